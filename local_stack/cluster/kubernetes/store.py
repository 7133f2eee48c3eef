"""Objects and their history in SQLite, with notification of every change."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from local_stack.cluster.kubernetes.errors import expired
from local_stack.cluster.kubernetes.resources import Resource

Json = dict[str, Any]
ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    resource TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (resource, namespace, name));
CREATE TABLE IF NOT EXISTS changes (
    version INTEGER PRIMARY KEY, type TEXT NOT NULL, resource TEXT NOT NULL, namespace TEXT NOT NULL,
    body TEXT NOT NULL, previous TEXT);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('version', 1), ('oldest', 1);
"""


@dataclass(frozen=True)
class Change:
    """One committed change; `previous` is the object before it (None for an addition)."""

    version: int
    type: ChangeType
    body: Json
    previous: Json | None


class ObjectStore:
    """Objects by resource, namespace and name; one global resourceVersion; a bounded history for watches.

    Thread-safe. Every write is one transaction: after a crash an object and its history entry are both there or
    neither. `history_limit` bounds the changes that a watch can replay.
    """

    def __init__(self, path: Path | str, *, history_limit: int = 10_000) -> None:
        self._connection = sqlite3.connect(str(path), check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(_SCHEMA)
        self._history_limit = history_limit
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    @property
    def version(self) -> int:
        """The newest resourceVersion."""
        with self._lock:
            return self._counter("version")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the store's lock and make what happens inside one SQLite transaction (nested use joins the outer)."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
            self._changed.notify_all()

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """The object, or None."""
        with self._lock:
            row = self._connection.execute(
                "SELECT body FROM objects WHERE resource = ? AND namespace = ? AND name = ?",
                (resource.plural, namespace, name),
            ).fetchone()
        return None if row is None else json.loads(row[0])

    def read_all(self, resource: Resource, namespace: str = "") -> tuple[list[Json], int]:
        """All objects (of one namespace, if given) by namespace and name, and the version they were read at."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT body FROM objects WHERE resource = ? AND (? = '' OR namespace = ?) ORDER BY namespace, name",
                (resource.plural, namespace, namespace),
            ).fetchall()
            version = self._counter("version")
        return [json.loads(row[0]) for row in rows], version

    def put(self, resource: Resource, body: Json) -> Json:
        """Write the object under the next resourceVersion and return it as stored."""
        metadata = body["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        with self.transaction():
            previous = self.get(resource, namespace, name)
            version = self._next_version()
            stored = {**body, "metadata": {**metadata, "resourceVersion": str(version)}}
            self._connection.execute(
                "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)",
                (resource.plural, namespace, name, json.dumps(stored)),
            )
            self._record(version, "ADDED" if previous is None else "MODIFIED", resource, stored, previous)
        return stored

    def remove(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Take the object away and return its last state, or None where there was none."""
        with self.transaction():
            previous = self.get(resource, namespace, name)
            if previous is None:
                return None
            version = self._next_version()
            self._connection.execute(
                "DELETE FROM objects WHERE resource = ? AND namespace = ? AND name = ?",
                (resource.plural, namespace, name),
            )
            last = {**previous, "metadata": {**previous["metadata"], "resourceVersion": str(version)}}
            self._record(version, "DELETED", resource, last, previous)
        return last

    def changes_after(self, resource: Resource, namespace: str, version: int) -> list[Change]:
        """The changes of that resource after `version`, oldest first. Raises 410 where they are no longer kept."""
        with self._lock:
            oldest = self._counter("oldest")
            if version < oldest:
                raise expired(f"too old resource version: {version} ({oldest})")
            rows = self._connection.execute(
                "SELECT version, type, body, previous FROM changes WHERE version > ? AND resource = ?"
                " AND (? = '' OR namespace = ?) ORDER BY version",
                (version, resource.plural, namespace, namespace),
            ).fetchall()
        return [Change(row[0], row[1], json.loads(row[2]), json.loads(row[3]) if row[3] else None) for row in rows]

    def wait_beyond(self, version: int, timeout_seconds: float | None, stop: Callable[[], bool] | None = None) -> int:
        """Block until the store is newer than `version`, the timeout passed, it closed, or `stop()` holds at a wake-up.

        Returns the newest version. `wake()` makes every waiter look again.
        """

        def done() -> bool:
            return self._closed or self._counter("version") > version or (stop is not None and stop())

        with self._changed:
            if not self._closed:
                self._changed.wait_for(done, timeout_seconds)
            return version if self._closed else self._counter("version")

    def wake(self) -> None:
        """Make every waiter look at its conditions again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """True once `close` was called: waiters return."""
        return self._closed

    def close(self) -> None:
        """Release every waiter and close the database."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._changed.notify_all()
                self._connection.close()

    def _counter(self, name: str) -> int:
        row = self._connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return int(row[0])

    def _next_version(self) -> int:
        self._connection.execute("UPDATE counters SET value = value + 1 WHERE name = 'version'")
        return self._counter("version")

    def _record(self, version: int, change: ChangeType, resource: Resource, body: Json, previous: Json | None) -> None:
        self._connection.execute(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?, ?)",
            (
                version,
                change,
                resource.plural,
                body["metadata"].get("namespace", ""),
                json.dumps(body),
                None if previous is None else json.dumps(previous),
            ),
        )
        oldest = version - self._history_limit
        if oldest > self._counter("oldest"):
            self._connection.execute("DELETE FROM changes WHERE version <= ?", (oldest,))
            self._connection.execute("UPDATE counters SET value = ? WHERE name = 'oldest'", (oldest,))
