"""Checkpoints written and read by functions of the user's own: whatever their format, the bytes are proved."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from truestep.checkpoints.errors import CheckpointError
from truestep.checkpoints.storage import Storage
from truestep.contract import CheckpointManifest, FileEntry

FOLDER = "files/"
"""Where they lie in a checkpoint: no name of theirs can meet one of truestep's."""


class OwnFunctions:
    """Functions that are called with a directory, on every rank."""

    def __init__(self, save: Callable[[Path], Any] | None, load: Callable[[Path], Any] | None) -> None:
        """save: None where checkpoints are written in another way. load: None where none of `save`'s is to be read."""
        if save is not None and load is None:
            raise CheckpointError("save= without load=: what it writes could never be read; give both")
        self._save = save
        self._load = load

    @property
    def writes(self) -> bool:
        """Whether these functions write the checkpoints."""
        return self._save is not None

    def write(self, storage: Storage, directory: str) -> list[FileEntry]:
        """Let `save` write into an empty directory, then move what it wrote into the checkpoint `directory`.

        Raises `CheckpointError` for what `save` raised, and for anything but plain files.
        """
        with storage.staging(directory) as staged:
            if self._save is not None:
                _call("save", self._save, staged)
            return [
                replace(storage.take(f"{directory}/{FOLDER}{name}", staged / name), path=FOLDER + name)
                for name in _plain_files(staged)
            ]

    def fetch(
        self, storage: Storage, directory: str, manifest: CheckpointManifest, kept: ExitStack
    ) -> Callable[[], None]:
        """Verify what `save` wrote, on whichever rank; returns what lets `load` read exactly that, until `kept` closes.

        Raises `CheckpointCorruptError` naming the file that differs. What is returned raises `CheckpointError` for what
        `load` raised.
        """
        load = self._load
        if load is None:
            raise CheckpointError(
                "a function of the user's own wrote it: give VerifiedCheckpoints(..., load=) its pair"
            )
        into = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="truestep-")))
        for entry in manifest.files:
            if entry.path.startswith(FOLDER):
                target = into / entry.path.removeprefix(FOLDER)
                target.parent.mkdir(parents=True, exist_ok=True)
                storage.fetch_verified(f"{directory}/{entry.path}", entry, target)
        return lambda: _call("load", load, into)


def is_own(manifest: CheckpointManifest) -> bool:
    """Whether functions of the user's own wrote the checkpoint."""
    return any(entry.path.startswith(FOLDER) for entry in manifest.files)


def written_wrongly(names_by_rank: Sequence[Sequence[str]]) -> list[str]:
    """What is wrong with the files that each rank wrote, as sentences: a name of two ranks, or no file at all."""
    writers: dict[str, list[int]] = {}
    for rank, names in enumerate(names_by_rank):
        for name in names:
            if name.startswith(FOLDER):
                writers.setdefault(name.removeprefix(FOLDER), []).append(rank)
    if not writers:
        return ["save wrote no file on any rank; write into the directory that it is called with"]
    return [
        f"save wrote {name} on ranks {', '.join(map(str, ranks[:8]))}: let one rank write it (if rank == 0), or put "
        "the rank into its name"
        for name, ranks in writers.items()
        if len(ranks) > 1
    ]


def _call(which: str, function: Callable[[Path], Any], directory: Path) -> None:
    try:
        function(directory)
    except Exception as error:
        raise CheckpointError(f"the function given as {which} raised {type(error).__name__}: {error}") from error


def _plain_files(root: Path) -> list[str]:
    """Paths relative to `root`, with forward slashes, sorted."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in [*folders, *files]):
            name = path.relative_to(root).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise CheckpointError(
                    f"save left {name!r}, which is not a plain file: a checkpoint holds its own bytes"
                )
            if "\\" in name or not name.isprintable():
                raise CheckpointError(f"save wrote {name!r}: give it a name without backslashes and control characters")
            if path.is_file():
                found.append(name)
    return sorted(found)
