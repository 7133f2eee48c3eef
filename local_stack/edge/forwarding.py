"""Send a request on to another server of the stack and bring its answer back, byte for byte."""

from __future__ import annotations

import http.client
from collections.abc import Iterable
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread

# What belongs to one connection (RFC 9110, 7.6.1), and what the server that answers writes itself.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "expect"})
_OWN = frozenset({"server", "date"})
_TIMEOUT_SECONDS = 900


@dataclass(frozen=True, kw_only=True)
class ForwardedAnswer:
    """An answer: `headers` keeps repeated names; `body` is as it came, still encoded."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Upstream:
    """A server behind the edge, on this machine."""

    def __init__(self, name: str, port: int, *, max_connections: int = 64) -> None:
        self.name = name
        self._port = port
        self._limiter = CapacityLimiter(max_connections)

    async def send(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes) -> ForwardedAnswer:
        """Forward one request. An unreachable server is a 502 that says which one."""
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
        try:
            return await to_thread.run_sync(self._exchange, method, target, kept, body, limiter=self._limiter)
        except OSError as error:
            message = (
                f"the local stack's {self.name} server does not answer ({error}); see its log in the state directory"
            )
            return ForwardedAnswer(status=502, headers=[("content-type", "text/plain")], body=message.encode())

    def _exchange(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> ForwardedAnswer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() != "content-length":
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            kept = [
                (name.lower(), value)
                for name, value in answer.getheaders()
                if name.lower() not in _HOP_BY_HOP | _OWN and (method == "HEAD" or name.lower() != "content-length")
            ]
            return ForwardedAnswer(status=answer.status, headers=kept, body=content)
        finally:
            connection.close()
