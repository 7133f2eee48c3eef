"""The way from the functions to the Kubernetes API: a TLS listener of the edge, so that calls can be made to fail.

Requests and answers pass byte for byte. Watches and other streams do not: functions have no use for them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import re
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import h11
from anyio import to_thread

from local_stack.edge.call_faults import CallFaults, CallSite, FaultKind, kubernetes_error
from local_stack.edge.http1 import receive_request

_TIMEOUT_SECONDS = 60
_TOKEN = re.compile(r"Bearer k8s-aws-v1\.([\w-]+)")
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length"})

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


class KubernetesProxy:
    """One listener in front of one API server."""

    def __init__(self, upstream_url: str, faults: CallFaults, kill: Callable[[str], Awaitable[None]]) -> None:
        """kill: ends what the functions of an access key are doing."""
        self._upstream = urlsplit(upstream_url)
        self._faults = faults
        self._kill = kill
        self._server: asyncio.Server | None = None
        self.url = ""
        self._client_context = ssl.create_default_context()

    async def start(self, pki_directory: Path) -> None:
        """Listen with the API server's own certificate at `url`."""
        self._client_context.load_verify_locations(pki_directory / "ca.crt")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki_directory / "server.crt", pki_directory / "server.key")
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            while await self._serve_one(connection, reader, writer):
                connection.start_next_cycle()
        except (ConnectionError, h11.RemoteProtocolError, ssl.SSLError):
            pass  # the caller was killed or broke off
        finally:
            with suppress(ConnectionError, ssl.SSLError):
                writer.close()

    async def _serve_one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request. False where the connection ends with it."""
        request, body = await receive_request(connection, reader)
        if request is None:
            return False
        site = _site(request)
        kind = self._faults.strike(site) if site is not None else None
        if kind is FaultKind.HANG:
            await reader.read()  # until the caller gives up
            return False
        if kind is not None and kind.kills and not kind.takes_effect:
            await self._kill(site.access_key if site else "")
            return False
        answer = await to_thread.run_sync(self._exchange, request, body) if kind is None or kind.takes_effect else None
        if kind is not None and kind.kills:
            await self._kill(site.access_key if site else "")
            return False
        if kind is not None and kind is not FaultKind.CUT:
            error = kubernetes_error(kind)
            answer = (error.status, [(name.encode(), value.encode()) for name, value in error.headers], error.body)
        assert answer is not None
        _send(connection, writer, answer, cut=kind is FaultKind.CUT)
        await writer.drain()
        return kind is not FaultKind.CUT and connection.our_state is not h11.MUST_CLOSE

    def _exchange(self, request: h11.Request, body: bytes) -> Answer:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._upstream.port, timeout=_TIMEOUT_SECONDS, context=self._client_context
        )
        try:
            headers = {
                name.decode(): value.decode() for name, value in request.headers if name.lower() not in _HOP_BY_HOP
            }
            connection.request(request.method.decode(), request.target.decode(), body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
            kept = [(name.encode(), value.encode()) for name, value in answer.getheaders()]
            return answer.status, [(name, value) for name, value in kept if name.lower() not in _HOP_BY_HOP], content
        except OSError as error:
            return 502, [(b"content-type", b"text/plain")], f"the API server does not answer: {error}".encode()
        finally:
            connection.close()


def _site(request: h11.Request) -> CallSite | None:
    """Who asks for what; None for a caller without an EKS token."""
    headers = {name.lower(): value.decode() for name, value in request.headers}
    token = _TOKEN.fullmatch(headers.get(b"authorization", ""))
    if token is None:
        return None
    try:
        url = base64.urlsafe_b64decode(token[1] + "=" * (-len(token[1]) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    access_key = parse_qs(urlsplit(url).query).get("X-Amz-Credential", [""])[0].split("/")[0]
    operation = f"{request.method.decode().lower()} {_resource(urlsplit(request.target.decode()).path)}"
    return CallSite(access_key=access_key, service="kubernetes", operation=operation)


def _resource(path: str) -> str:
    """``/apis/batch/v1/namespaces/a/jobs/b/log`` -> ``jobs/log``; names are left out."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join(part for index, part in enumerate(parts) if index != 1) or path


def _send(connection: h11.Connection, writer: asyncio.StreamWriter, answer: Answer, *, cut: bool) -> None:
    status, headers, body = answer
    head = h11.Response(status_code=status, headers=[*headers, (b"content-length", str(len(body)).encode())])
    writer.write(connection.send(head) or b"")
    if cut:
        writer.write(body[: len(body) // 2])
        return
    for event in (h11.Data(data=body), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
