"""Makes the CloudFormation template of a deployment.

    python app.py [--context FILE.json] [--output DIR] [--nag]

Reads the context of ``cdk.json``, overridden by the file's, and files of this repository; no account, credentials,
clock or network. The CDK command line runs it too (``cdk deploy``): its ``--context`` and ``--output`` win then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.configuration import CONTEXT_KEY, check_destination, parse_settings
from infra.errors import ConfigurationError, InfrastructureError
from infra.paths import REPOSITORY
from infra.synthesis import synthesise


def read_context(path: Path) -> dict[str, Any]:
    """The context object of a JSON file: its ``context``, as in ``cdk.json``, or the whole object.

    Raises ConfigurationError where the file is missing, is not a JSON object or has no settings: they would silently be
    those of another file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the context file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    context = document.get("context", document) if isinstance(document, dict) else None
    if not isinstance(context, dict):
        raise ConfigurationError(f"{path}: expected a JSON object with the settings under {CONTEXT_KEY!r}")
    if CONTEXT_KEY not in context:
        raise ConfigurationError(f"{path} has no {CONTEXT_KEY!r}: put the settings under that key, as in cdk.json")
    return context


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make the CloudFormation template of a deployment.")
    parser.add_argument(
        "--context",
        type=Path,
        default=os.environ.get("TRUESTEP_CONTEXT"),
        help="JSON file whose 'truestep' replaces cdk.json's (also: environment variable TRUESTEP_CONTEXT)",
    )
    parser.add_argument("--output", type=Path, help="folder of the cloud assembly (default: cdk.out)")
    parser.add_argument("--nag", action="store_true", help="check against AWS Solutions; findings fail")
    options = parser.parse_args(arguments)
    output = options.output or (None if "CDK_OUTDIR" in os.environ else REPOSITORY / "cdk.out")
    try:
        context = read_context(REPOSITORY / "cdk.json")
        if options.context:
            context |= read_context(Path(options.context))
        check_destination(parse_settings(context), os.environ)
        print(synthesise(context, output, nag=options.nag))
    except InfrastructureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
