"""An answer that breaks off in the middle is no answer: never one without the item that it did not come to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from lambdas.adapters import aws
from lambdas.adapters.aws import client, transient_errors
from lambdas.adapters.eks_access import connect
from lambdas.domain.errors import TransientError

ITEM = b'{"Item": {"PK": {"S": "JOB#1"}, "incident_id": {"S": "inc-1"}}}'
MAC = b'{"KeyId": "key", "MacValid": true, "MacAlgorithm": "HMAC_SHA_256"}'
PUBLISHED = b"<PublishResponse><PublishResult><MessageId>1</MessageId></PublishResult></PublishResponse>"
CLUSTER = b'{"cluster": {"name": "eks", "endpoint": "https://eks", "certificateAuthority": {"data": ""}}}'


class Server:
    """Answers every request with the same bytes, as many of them as `sent`, and hangs up."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.body = b""
        self.sent = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                head = f'HTTP/1.1 200 OK\r\nContent-Length: {len(self.body)}\r\nETag: "1"\r\n\r\n'
                connection.sendall(head.encode() + self.body[: self.sent])

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    running = Server()
    values = {"AWS_ENDPOINT_URL": running.url, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**values, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    aws._client.cache_clear()
    yield running
    aws._client.cache_clear()
    running.close()


def get_item() -> Any:
    return client("dynamodb").get_item(TableName="t", Key={"PK": {"S": "JOB#1"}})["Item"]["incident_id"]["S"]


def verify_mac() -> Any:
    asked = {"KeyId": "key", "Message": b"x", "Mac": b"y", "MacAlgorithm": "HMAC_SHA_256"}
    return client("kms").verify_mac(**asked)["MacValid"]


def publish() -> Any:
    return client("sns").publish(TopicArn="arn:aws:sns:us-east-1:1:t", Message="x")["MessageId"]


def get_object() -> Any:
    return client("s3").get_object(Bucket="bucket", Key="key")["Body"].read()


def connect_cluster() -> Any:
    return bool(connect(boto3.Session(region_name="us-east-1"), "eks"))


CALLS = [
    (get_item, ITEM, "inc-1"),
    (verify_mac, MAC, True),
    (publish, PUBLISHED, "1"),
    (get_object, b"whole", b"whole"),
]


@pytest.mark.parametrize(("call", "body", "answer"), CALLS)
def test_half_an_answer_is_tried_again_and_a_whole_one_is_taken(
    server: Server, call: Callable[[], Any], body: bytes, answer: Any
) -> None:
    server.body = body
    for server.sent in (0, 1, len(body) // 2, len(body) - 1):
        with pytest.raises(TransientError), transient_errors():
            call()
    server.sent = len(body)
    assert call() == answer


def test_half_a_clusters_description_is_tried_again(server: Server) -> None:
    server.body, server.sent = CLUSTER, len(CLUSTER) // 2
    with pytest.raises(TransientError, match="bytes of DescribeCluster's answer arrived"), transient_errors():
        connect_cluster()


def test_the_answer_to_a_head_request_has_no_body_to_miss(server: Server) -> None:
    server.body, server.sent = b"12345", 0
    assert client("s3").head_object(Bucket="bucket", Key="key")["ContentLength"] == 5
