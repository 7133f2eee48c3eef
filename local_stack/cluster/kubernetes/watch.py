"""Watches: changes after a resourceVersion as JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.resources import Resource
from local_stack.cluster.kubernetes.selectors import Predicate
from local_stack.cluster.kubernetes.store import Change, Json, ObjectStore


def _line(change_type: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"type": change_type, "object": body}).encode() + b"\n"


def _seen_through(change: Change, matches: Predicate) -> str | None:
    """The change as a watcher with a selector sees it: what stops matching is deleted, what starts is added."""
    before = change.previous is not None and matches(change.previous)
    after = change.type != "DELETED" and matches(change.body)
    if before and after:
        return "MODIFIED"
    if after:
        return "ADDED"
    return "DELETED" if before else None


def watch(
    store: ObjectStore,
    resource: Resource,
    namespace: str,
    version: str,
    matches: Predicate,
    *,
    timeout_seconds: float,
    alive: Callable[[], bool],
    shown: Callable[[Json], Json] = lambda body: body,
) -> Iterator[bytes]:
    """Yield JSON lines until the timeout, the client's departure or the store's end.

    `version` empty or "0": every existing object is ADDED first. A version that is no longer in the history gives one
    ERROR line with a 410 Status, and the end. `shown` turns an object into what the client asked to see (a table).
    """
    deadline = time.monotonic() + timeout_seconds
    if version in ("", "0"):
        bodies, position = store.read_all(resource, namespace)
        for body in bodies:
            if matches(body):
                yield _line("ADDED", shown(body))
    else:
        position = int(version)
    while not store.closed:
        try:
            newest = store.version
            changes = store.changes_after(resource, namespace, position)
        except ApiError as error:
            yield _line("ERROR", error.status())
            return
        for change in changes:
            if seen := _seen_through(change, matches):
                yield _line(seen, shown(change.body))
        position = max(newest, changes[-1].version if changes else position)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not alive():
            return
        yield b""
        store.wait_beyond(position, remaining)
