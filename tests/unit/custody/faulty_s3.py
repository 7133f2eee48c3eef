"""An HTTP server in front of a real S3 server that fails as scripted: answers, connections and listings."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

REFUSALS = {
    503: ("SlowDown", "Please reduce your request rate."),
    500: ("InternalError", "We encountered an internal error. Please try again."),
}


@dataclass
class Rule:
    """What happens to requests whose ``METHOD /path?query`` matches."""

    pattern: str
    action: str
    """``503``, ``500``; ``lost`` (carried out, no answer); ``cut`` (half of the answer); ``hang`` (no answer at all);
    ``hide TEXT`` (a listing without the prefixes that hold TEXT)."""
    times: int | None = None
    """How often each path is hit; None: always."""
    hits: dict[str, int] = field(default_factory=dict)

    def applies(self, request: str) -> bool:
        """Whether this request is hit; counts."""
        if not re.search(self.pattern, request):
            return False
        key = request if self.times is not None else ""
        self.hits[key] = self.hits.get(key, 0) + 1
        return self.times is None or self.hits[key] <= self.times

    @property
    def fired(self) -> int:
        """Requests that matched."""
        return sum(self.hits.values())


class FaultyS3:
    """The script, and the address that clients use."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.rules: list[Rule] = []
        self.requests: list[str] = []
        self.over = threading.Event()

    def add(self, pattern: str, action: str, times: int | None = None) -> Rule:
        """Add a rule; the first one that applies counts."""
        self.rules.append(Rule(pattern, action, times))
        return self.rules[-1]


@contextmanager
def faulty_s3(behind: str) -> Iterator[FaultyS3]:
    """Serve in front of the server at the URL `behind`."""
    upstream = urlsplit(behind).netloc
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = f"{self.command} {self.path}"
            with lock:
                faulty.requests.append(request)
                action = next((rule.action for rule in faulty.rules if rule.applies(request)), "")
            if action.isdigit():
                self._refuse(int(action))
            elif action == "hang":
                faulty.over.wait(60)
                self.close_connection = True
            else:
                self._forward(body, action)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

        def _refuse(self, status: int) -> None:
            code, message = REFUSALS[status]
            content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], content, len(content))

        def _forward(self, body: bytes, action: str) -> None:
            connection = http.client.HTTPConnection(upstream, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in _OF_CONNECTION]
            connection.close()
            if action == "lost":
                self.close_connection = True
                return
            if action.startswith("hide "):
                hidden = re.escape(action.removeprefix("hide ")).encode()
                entry = rb"<CommonPrefixes>\s*<Prefix>[^<]*" + hidden + rb"[^<]*</Prefix>\s*</CommonPrefixes>"
                content = re.sub(entry, b"", content)
            length = int(answer.headers["Content-Length"]) if self.command == "HEAD" else len(content)
            shown = content[: len(content) // 2] if action == "cut" else content
            self._answer(answer.status, kept, shown, length)
            self.close_connection |= action == "cut"

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    faulty = FaultyS3(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield faulty
    finally:
        faulty.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


_OF_CONNECTION = {"content-length", "connection", "transfer-encoding", "date", "server"}
