"""``truestep fingerprint``: the fingerprints of what is in a file."""

from __future__ import annotations

from pathlib import Path

from truestep.cli.errors import CommandError
from truestep.cli.output import print_json, say_whole, working
from truestep.cli.tensors import load_file, require_torch, tensors_of
from truestep.contract.words import counted


def show_fingerprints(path: Path, *, as_json: bool) -> None:
    """Print one line a tensor, ``fingerprint  name``, and the combined one last. Raises `CommandError`."""
    require_torch("truestep fingerprint")
    with working(f"reading {path}"):
        tensors = tensors_of(load_file(path))
    if not tensors:
        raise CommandError(f"{path} holds no tensor")
    from truestep.fingerprint import fingerprint_tensors

    try:
        with working(f"fingerprinting {counted(len(tensors), 'tensor')}"):
            table = fingerprint_tensors(tensors)
    except TypeError as error:
        raise CommandError(f"{path}: {error}") from error
    if as_json:
        print_json({"file": str(path), "combined": table.combined, "tensors": dict(table)})
        return
    # In the file's order, whatever groups the tensors were taken in.
    for name in tensors:
        say_whole(f"{table[name]}  {name}")
    say_whole(f"{table.combined}  all {len(table)} together")
