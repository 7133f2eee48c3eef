"""Scripted functions: a server that the edge calls instead of running handlers, because the order is under test."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Returns:
    """The function returns an outcome."""

    outcome: str
    wait_seconds: int | None = None


@dataclass(frozen=True)
class Raises:
    """The function fails with an exception of this class."""

    error_type: str


@dataclass(frozen=True)
class Answers:
    """The function returns, and the task's token is completed with this outcome."""

    outcome: str = "resumed"
    resume_from: str | None = None


@dataclass(frozen=True)
class KeepsSilent:
    """The function returns, and nobody uses the token."""


Reply = Returns | Raises | Answers | KeepsSilent
NOWHERE = Answers(resume_from="nowhere")
"""Ends an escalated execution: no state has that name."""


@dataclass(frozen=True)
class Invocation:
    """What a function was called with."""

    function: str
    event: dict[str, Any]


class Script:
    """Replies by (incident, function), in order; without one a function escalates, and `escalate` ends it all."""

    def __init__(self, send_token: Callable[[str, dict[str, Any]], None]) -> None:
        """send_token: completes a task, given its token and the output."""
        self._send_token = send_token
        self._replies: defaultdict[tuple[str, str], deque[Reply]] = defaultdict(deque)
        self._invocations: defaultdict[str, list[Invocation]] = defaultdict(list)
        self._changed = threading.Condition()
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                failed, payload = script.invoke(self.path.strip("/"), event)
                body = json.dumps(payload).encode()
                self.send_response(200)
                if failed:
                    self.send_header("X-Amz-Function-Error", "Unhandled")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def plan(self, incident_id: str, function: str, *replies: Reply) -> None:
        """Add replies of a function for an incident."""
        self._replies[incident_id, function].extend(replies)

    def invocations(self, incident_id: str) -> list[Invocation]:
        """What was called for an incident so far."""
        with self._changed:
            return list(self._invocations[incident_id])

    def wait_for(self, incident_id: str, function: str, *, count: int = 1) -> list[Invocation]:
        """Wait until a function was called `count` times; fails after 20 s."""

        def calls() -> list[Invocation]:
            return [call for call in self._invocations[incident_id] if call.function == function]

        with self._changed:
            assert self._changed.wait_for(lambda: len(calls()) >= count, timeout=20), f"{function} was not called"
            return calls()

    def invoke(self, function: str, event: dict[str, Any]) -> tuple[bool, Any]:
        """Return (failed, payload) of one invocation."""
        incident_id = event["incident_id"]
        with self._changed:
            self._invocations[incident_id].append(Invocation(function, event))
            replies = self._replies[incident_id, function]
            default: Reply = NOWHERE if function == "escalate" else Returns("escalate")
            reply = replies.popleft() if replies else default
            self._changed.notify_all()
        if isinstance(reply, Raises):
            return True, {"errorType": reply.error_type, "errorMessage": "as the script says"}
        if isinstance(reply, KeepsSilent):
            return False, {}
        answer: dict[str, Any] = {"incident_id": incident_id, "outcome": reply.outcome, "reason": 'a "scripted" reason'}
        if isinstance(reply, Returns):
            if reply.wait_seconds is not None:
                answer["wait_seconds"] = reply.wait_seconds
            if "task_token" not in event:
                return False, answer
        elif reply.resume_from is not None:
            answer["resume_from"] = reply.resume_from
        self._send_token(event["task_token"], answer)
        return False, {}
