"""What subscribers of each kind get from the topic."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest

from lambdas.domain.incident import Incident
from lambdas.request_approval.handler import handler as request_approval
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, link_of


@pytest.fixture
def channel() -> Iterator[tuple[str, Queue[dict[str, Any]]]]:
    """Where a chat service would listen, and what arrived there."""
    arrived: Queue[dict[str, Any]] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", arrived
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_chat_channel_gets_its_own_form_and_everybody_else_the_text(
    cloud: Cloud, incident: Incident, channel: tuple[str, Queue[dict[str, Any]]]
) -> None:
    endpoint, arrived = channel
    cloud.client("sns").subscribe(TopicArn=cloud.topic_arn, Protocol="https", Endpoint=endpoint)
    _, token = cloud.waiting_execution()
    request_approval({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    (mail,) = cloud.messages()
    path, _ = link_of(mail)
    assert path == f"/incidents/{incident.incident_id}"
    delivered = arrived.get(timeout=10)
    while delivered["Type"] != "Notification":
        delivered = arrived.get(timeout=10)
    chat = json.loads(delivered["Message"])
    assert chat["metadata"]["threadId"] == incident.incident_id
    assert f"/incidents/{incident.incident_id}?" in chat["content"]["nextSteps"][0]
    assert mail["MessageAttributes"]["kind"]["Value"] == "approval"
