"""A small threaded HTTP/1.1 server on 127.0.0.1, with or without TLS: one thread a connection, streams where asked."""

from __future__ import annotations

import json
import logging
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
_HANDSHAKE_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Request:
    """One request. `alive()` tells whether the client is still connected."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    alive: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Response:
    """One response: a body, or `stream`, an iterator of chunks that are sent as they come."""

    code: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    stream: Iterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def json_response(document: Any, code: int = 200, content_type: str = "application/json") -> Response:
    """A response of one JSON document."""
    return Response(code, json.dumps(document).encode(), content_type)


Handler = Callable[[Request], Response]


class _ConnectionHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: LoopbackServer

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        logger.debug(format, *arguments)

    def _client_connected(self) -> bool:
        """False once the client closed: its socket is readable and empty. TLS keeps that readable as well."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return True
        try:
            if isinstance(self.connection, ssl.SSLSocket):
                return bool(self.connection.pending())
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            self._send(json_response({"message": "send a Content-Length of at most 4 MiB"}, 413))
            return
        parts = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=unquote(parts.path),
            query={key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()},
            headers={key.lower(): value for key, value in self.headers.items()},
            body=self.rfile.read(length) if length else b"",
            alive=self._client_connected,
        )
        try:
            response = self.server.handle_with(request)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            response = json_response({"message": "internal error; see the server's log"}, 500)
        self._send(response)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _send(self, response: Response) -> None:
        head = [f"HTTP/1.1 {response.code} {self.responses.get(response.code, ('',))[0]}"]
        head.append(f"Content-Type: {response.content_type}")
        head.extend(f"{name}: {value}" for name, value in response.headers.items())
        if response.stream is None:
            head.append(f"Content-Length: {len(response.body)}")
        else:
            head.append("Transfer-Encoding: chunked")
        if self.close_connection:
            head.append("Connection: close")
        data = ("\r\n".join(head) + "\r\n\r\n").encode()
        try:
            # One write: a head and a body in two packets cost a delayed acknowledgement.
            self.wfile.write(data + response.body)
            if response.stream is not None:
                for chunk in response.stream:
                    if chunk:
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, ValueError):
            self.close_connection = True
        finally:
            close = getattr(response.stream, "close", None)
            if close is not None:
                close()


class LoopbackServer(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1 (or `port`) and answers every request with `handler`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, handler: Handler, *, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.handle_with = handler
        self._tls = tls
        self._serving = False
        super().__init__(("127.0.0.1", port), _ConnectionHandler)

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Serve in a daemon thread until `stop`."""
        self._serving = True
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name=f"http {self.url}", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop accepting, and close the listening socket; also where it never served."""
        if self._serving:
            self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Speak TLS first where asked: in the connection's own thread, so that a slow client holds up nobody."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_HANDSHAKE_TIMEOUT_SECONDS)
        with self._tls.wrap_socket(request, server_side=True) as encrypted:
            encrypted.settimeout(None)
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that breaks off is no event; anything else is in the log by now."""
        logger.debug("connection of %s broke off: %s", client_address, sys.exc_info()[1])
