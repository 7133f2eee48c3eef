"""The Lambda Runtime API of one instance: the HTTP server from which `awslambdaric` takes its invocations.

Each instance has its own port, because the runtime is told nothing but a host and a port.
Source: AWS Lambda Developer Guide, "Using the Lambda runtime API" (version 2018-06-01).
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import h11

from local_stack.edge.http1 import receive_request

_PREFIX = "/2018-06-01/runtime/"
_TRACE = "Root=1-00000000-000000000000000000000000;Sampled=0"

Headers = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an invocation ended in: the payload (JSON text), and whether it is the function's error."""

    payload: bytes
    failed: bool = False

    @classmethod
    def error(cls, error_type: str, message: str) -> Outcome:
        """Return a failure as the Lambda service words it."""
        return cls(payload=json.dumps({"errorMessage": message, "errorType": error_type}).encode(), failed=True)


@dataclass(kw_only=True)
class Invocation:
    """One event on its way through an instance."""

    request_id: str
    function_arn: str
    event: bytes
    timeout_seconds: float
    outcome: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def finish(self, outcome: Outcome) -> None:
        """Record the outcome; the first one counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class RuntimeApi:
    """Serves one runtime process. `polled` is set when the runtime first asks for work: its module is loaded."""

    def __init__(self) -> None:
        self.polled = asyncio.Event()
        self.initialisation_error: Outcome | None = None
        self._next: asyncio.Queue[Invocation] = asyncio.Queue()
        self._current: Invocation | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; return the value of `AWS_LAMBDA_RUNTIME_API`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def submit(self, invocation: Invocation) -> None:
        """Hand an event to the runtime's next poll."""
        self._next.put_nowait(invocation)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            while True:
                request, body = await receive_request(connection, reader)
                if request is None:
                    break
                status, headers, content = await self._answer(request, body)
                _send(connection, writer, status, headers, content)
                await writer.drain()
                if connection.our_state is h11.MUST_CLOSE:
                    break
                connection.start_next_cycle()
        except (ConnectionError, h11.RemoteProtocolError):
            pass  # the runtime was killed; whoever killed it finishes its invocation
        finally:
            writer.close()

    async def _answer(self, request: h11.Request, body: bytes) -> tuple[int, Headers, bytes]:
        path = request.target.decode().removeprefix(_PREFIX)
        match request.method, path.split("/"):
            case b"GET", ["invocation", "next"]:
                return await self._hand_out()
            case b"POST", ["invocation", request_id, ("response" | "error") as kind]:
                current = self._current
                if current is None or current.request_id != request_id:
                    return 400, [], b'{"errorType":"InvalidRequestID"}'
                current.finish(Outcome(payload=body or b"null", failed=kind == "error"))
                return 202, [], b'{"status":"OK"}'
            case b"POST", ["init", "error"]:
                self.initialisation_error = Outcome(payload=body, failed=True)
                return 202, [], b'{"status":"OK"}'
        return 404, [], b'{"errorType":"UnknownPath"}'

    async def _hand_out(self) -> tuple[int, Headers, bytes]:
        self.polled.set()
        invocation = self._current = await self._next.get()
        deadline = int((time.time() + invocation.timeout_seconds) * 1000)
        headers = [
            ("Lambda-Runtime-Aws-Request-Id", invocation.request_id),
            ("Lambda-Runtime-Deadline-Ms", str(deadline)),
            ("Lambda-Runtime-Invoked-Function-Arn", invocation.function_arn),
            ("Lambda-Runtime-Trace-Id", _TRACE),
        ]
        return 200, headers, invocation.event


def _send(connection: h11.Connection, writer: asyncio.StreamWriter, status: int, headers: Headers, body: bytes) -> None:
    all_headers = [*headers, ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    response = h11.Response(status_code=status, headers=[(k.encode(), v.encode()) for k, v in all_headers])
    for event in (response, h11.Data(data=body), h11.EndOfMessage()):
        data = connection.send(event)
        if data:
            writer.write(data)
