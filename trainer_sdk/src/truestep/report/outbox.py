"""The outbox: events on a durable directory until the bus has accepted them.

    <directory>/pending/<event id>.json     to be sent
    <directory>/accepted/<event id>         an alarm that the bus accepted, so that no other rank sends it again
    <directory>/refused/<event id>.json     the bus will never take it; kept for people, with the reason

One file an event, named by its id: every rank's copy and every retry of an event is the same file.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.contract import ContractError, DetailType, canonical_bytes, from_json, parse_json

_LOG = logging.getLogger("truestep.report")


@dataclass(frozen=True, kw_only=True)
class OutboxEntry:
    """One event on its way to the bus."""

    event_id: str
    """Names the file: letters, digits, ``-``."""
    detail_type: DetailType
    detail: Mapping[str, Any]
    created_at: str
    """ISO 8601, UTC; entries are sent in this order."""


class Outbox:
    """The directory. What reads or writes a file raises `OSError` where it fails; an unreadable one is set aside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pending = directory / "pending"
        self._accepted = directory / "accepted"
        self._refused = directory / "refused"

    def put(self, entry: OutboxEntry) -> bool:
        """Write the entry durably. False where the bus has accepted it already; writing it twice is harmless."""
        if self.was_accepted(entry.event_id):
            return False
        path, content = self._pending / f"{entry.event_id}.json", canonical_bytes(entry)
        self._pending.mkdir(parents=True, exist_ok=True)
        try:
            _write_durably(path, content)
        except FileNotFoundError:
            # A rank that ended has removed the empty directory in between; one ends only once.
            self._pending.mkdir(parents=True, exist_ok=True)
            _write_durably(path, content)
        return True

    def remove_if_empty(self) -> None:
        """Leave no directory behind that holds nothing."""
        for directory in (self._pending, self._accepted, self._refused, self.directory):
            with suppress(OSError):
                directory.rmdir()

    def pending(self) -> list[OutboxEntry]:
        """The entries to be sent, oldest first. One that cannot be read is moved to ``refused``."""
        entries: list[OutboxEntry] = []
        paths = sorted(self._pending.glob("*.json")) if self._pending.is_dir() else []
        for path in paths:
            try:
                entries.append(from_json(OutboxEntry, parse_json(path.read_bytes())))
            except FileNotFoundError:
                continue  # another rank has just had it accepted
            except (ValueError, ContractError) as error:
                _LOG.error("outbox entry %s cannot be read and is set aside: %s", path, error)
                self._set_aside(path, str(error))
        return sorted(entries, key=lambda entry: (entry.created_at, entry.event_id))

    def is_pending(self, event_id: str) -> bool:
        """Whether the entry waits to be sent. False where the directory cannot be searched."""
        return _exists(self._pending / f"{event_id}.json")

    def was_accepted(self, event_id: str) -> bool:
        """Whether the bus has accepted this alarm, from whichever rank. False where the directory cannot be searched:
        sending twice is harmless, and never sending is not."""
        return _exists(self._accepted / event_id)

    def is_refused(self, event_id: str) -> bool:
        """Whether the bus will never take it. False where the directory cannot be searched."""
        return _exists(self.reason_path(event_id))

    def reason_path(self, event_id: str) -> Path:
        """Where it says why an event was set aside."""
        return self._refused / f"{event_id}.reason.txt"

    def accept(self, entry: OutboxEntry) -> None:
        """The bus has it: remove the entry. An alarm leaves a mark, for the ranks that stand by to send it."""
        if entry.detail_type is DetailType.ALARM:
            self._accepted.mkdir(parents=True, exist_ok=True)
            _write_durably(self._accepted / entry.event_id, b"")
        (self._pending / f"{entry.event_id}.json").unlink(missing_ok=True)

    def refuse(self, entry: OutboxEntry, reason: str) -> None:
        """The bus will never take it: keep it aside with the reason."""
        self._set_aside(self._pending / f"{entry.event_id}.json", reason)

    def _set_aside(self, path: Path, reason: str) -> None:
        self._refused.mkdir(parents=True, exist_ok=True)
        _write_durably(self.reason_path(path.stem), reason.encode())
        with suppress(FileNotFoundError):
            path.replace(self._refused / path.name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _write_durably(target: Path, content: bytes) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        temporary.unlink(missing_ok=True)
