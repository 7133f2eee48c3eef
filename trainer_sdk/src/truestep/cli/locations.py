"""What a person may type for a checkpoint root or a checkpoint: a URI or a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from truestep.checkpoints.catalogue import CheckpointRecord, directory_step, find_record, list_records
from truestep.checkpoints.storage import Storage, open_storage
from truestep.cli.errors import CommandError


@dataclass(frozen=True)
class Place:
    """A root, or one checkpoint below it."""

    storage: Storage
    directory: str = ""
    """Empty for a root."""

    @property
    def uri(self) -> str:
        return f"{self.storage.root_uri}/{self.directory}" if self.directory else self.storage.root_uri

    def records(self) -> list[CheckpointRecord]:
        """The checkpoint, or every one below the root, newest first. Raises `CommandError` where there is none."""
        if not self.directory:
            found = list_records(self.storage)
            if not found:
                raise CommandError(f"no checkpoint below {self.uri}: none of its directories has a manifest.json")
            return found
        record = find_record(self.storage, self.directory)
        if record is None:
            raise CommandError(
                f"{self.uri} is not a checkpoint: it has no manifest.json; "
                f"`truestep checkpoints list {self.storage.root_uri}` shows those that are complete"
            )
        return [record]

    def record(self) -> CheckpointRecord:
        """The one checkpoint. Raises `CommandError` for a root."""
        if not self.directory:
            raise CommandError(f"{self.uri} is not one checkpoint; name one of the step-... directories below it")
        return self.records()[0]


def locate(text: str, on_read: Callable[[int], object] = lambda _: None, *, argument: str = "URI") -> Place:
    """Where `text` points. Raises `CommandError` for a missing directory, and for what is no place at all.

    on_read: see `open_storage`. argument: what the command's help calls it.
    """
    if not text.strip():
        raise CommandError(
            f"{argument} is empty, as by a variable of the shell that is not set; give s3://bucket/prefix, "
            "file:///directory or a directory (. is the current one)"
        )
    uri = text.rstrip("/") if "://" in text else Path(text).resolve().as_uri()
    parts = urlsplit(uri)
    if parts.scheme not in ("file", "s3") or (parts.scheme == "s3" and not parts.netloc):
        raise CommandError(
            f"{text} is neither s3://bucket/prefix nor file:///absolute/directory nor a directory; give one of these "
            f"as {argument}"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            meant = Path(unquote(parts.netloc + parts.path))
            raise CommandError(
                f"{text} names a host, {parts.netloc}, and no directory: file:// takes three slashes and an absolute "
                f"path; give {meant.resolve().as_uri()}, or {meant} without file://"
            )
        directory = Path(unquote(parts.path))
        if not directory.is_dir():
            raise CommandError(f"{directory} is not a directory; give a checkpoint root or a checkpoint")
    root, _, name = uri.rpartition("/")
    if directory_step(name) is not None:
        return Place(open_storage(root, on_read=on_read), name)
    return Place(open_storage(uri, on_read=on_read))
