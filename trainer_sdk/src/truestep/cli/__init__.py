"""The command line, ``truestep``. Loads nothing but the standard library until `main` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

FINE = 0
FINDING = 1
"""Something is damaged, revoked or different."""
BAD_INPUT = 2
"""The command could not do what it was asked to; the message says what to change."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. arguments: None takes the process's own. Raises `SystemExit` with the exit code."""
    try:
        import rich  # noqa: F401 - named here, so that the message is about the extra and not about one of its parts
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.stderr.write(f"truestep: the command line needs {error.name}: pip install 'truestep[cli]'\n")
        raise SystemExit(BAD_INPUT) from None
    from truestep.cli.application import run

    raise SystemExit(run(arguments))
