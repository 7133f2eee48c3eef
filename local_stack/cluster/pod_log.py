"""A pod's log: lines with the time they came, in the format of container runtimes, followed without polling."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO

from local_stack.cluster.http_server import Response
from local_stack.cluster.kubernetes.errors import bad_request


class PodLog:
    """Appends what the process writes to a file, one `<time> <line>` a line, and wakes those who follow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._grown = threading.Condition()
        self._finished = True

    def begin(self) -> None:
        """Say that a process is about to write: from now on followers wait for it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._grown:
            self._finished = False

    def pump(self, source: IO[bytes]) -> None:
        """Copy `source` until its end: in a thread of its own, after `begin`."""
        with source, self._path.open("ab", buffering=0) as log:
            for line in source:
                stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
                log.write(stamp + b" " + line.rstrip(b"\n") + b"\n")
                with self._grown:
                    self._grown.notify_all()
        with self._grown:
            self._finished = True
            self._grown.notify_all()

    def response(self, query: dict[str, str]) -> Response:
        """Answer `GET .../log` with tailLines, limitBytes, sinceSeconds, timestamps and follow. Raises 400."""
        stamped = query.get("timestamps") in ("true", "1")
        lines = self._selected(query)
        if query.get("follow") in ("true", "1"):
            return Response(content_type="text/plain", stream=self._follow(lines, stamped=stamped))
        body = b"".join(_shown(line, stamped=stamped) for line in lines)
        limit = _number(query, "limitBytes")
        return Response(body=body if limit is None else body[:limit], content_type="text/plain")

    def end(self, *, lines: int, size: int) -> str:
        """The last lines, at most `size` bytes of them."""
        shown = b"".join(_shown(line, stamped=False) for line in self._selected({"tailLines": str(lines)}))
        return shown[-size:].decode(errors="replace")

    def _selected(self, query: dict[str, str]) -> list[bytes]:
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        since = _number(query, "sinceSeconds")
        if since is not None:
            earliest = (datetime.now(UTC) - timedelta(seconds=since)).strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
            lines = [line for line in lines if line >= earliest]
        tail = _number(query, "tailLines")
        if tail is not None:
            lines = lines[len(lines) - min(tail, len(lines)) :]
        return lines

    def _follow(self, lines: list[bytes], *, stamped: bool) -> Iterator[bytes]:
        size = self._path.stat().st_size if self._path.exists() else 0
        for line in lines:
            yield _shown(line, stamped=stamped)
        while True:
            with self._grown:
                self._grown.wait_for(partial(self._news_after, size))
                finished = self._finished
            if self._size() > size:
                with self._path.open("rb") as log:
                    log.seek(size)
                    added = log.read()
                size += len(added)
                yield b"".join(_shown(line, stamped=stamped) for line in added.splitlines(keepends=True))
            elif finished:
                return

    def _news_after(self, size: int) -> bool:
        return self._finished or self._size() > size

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


def _shown(line: bytes, *, stamped: bool) -> bytes:
    return line if stamped else line.partition(b" ")[2]


def _number(query: dict[str, str], name: str) -> int | None:
    value = query.get(name, "")
    if not value:
        return None
    if not value.isdigit():
        raise bad_request(f"{name} must be a number that is not negative, not {value!r}")
    return int(value)
