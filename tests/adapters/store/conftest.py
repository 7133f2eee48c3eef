"""The table on a real moto server, and its in-memory twin."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from lambdas.adapters.store import DynamoIncidentStore
from lambdas.ports import IncidentStore
from lambdas.settings import LISTED, LISTED_AT, LISTING_INDEX
from tests.adapters.store.memory import MemoryIncidentStore


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def dynamodb(moto_url: str) -> Any:
    client = boto3.client(
        "dynamodb",
        endpoint_url=moto_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    return _OneCallAtATime(client)


class _OneCallAtATime:
    """Makes every call atomic, as DynamoDB does.

    moto rolls a cancelled transaction back by restoring a copy of the whole table, and with it undoes what other
    threads wrote meanwhile. Threads still interleave between calls, which is what the store must withstand.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()

    def __getattr__(self, operation: str) -> Any:
        call = getattr(self._client, operation)

        def atomic(**arguments: Any) -> Any:
            with self._lock:
                return call(**arguments)

        return atomic


@pytest.fixture
def table(dynamodb: Any) -> str:
    name = f"incidents-{uuid.uuid4().hex[:8]}"
    dynamodb.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "PK", "KeyType": "HASH"}, {"AttributeName": "SK", "KeyType": "RANGE"}],
        AttributeDefinitions=[
            {"AttributeName": name, "AttributeType": "S"} for name in ("PK", "SK", LISTED, LISTED_AT)
        ],
        GlobalSecondaryIndexes=[
            {
                "IndexName": LISTING_INDEX,
                "KeySchema": [
                    {"AttributeName": LISTED, "KeyType": "HASH"},
                    {"AttributeName": LISTED_AT, "KeyType": "RANGE"},
                ],
                "Projection": {"ProjectionType": "INCLUDE", "NonKeyAttributes": ["status", "job_key"]},
            }
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    return name


@pytest.fixture(params=["dynamodb", "memory"])
def store(request: pytest.FixtureRequest) -> IncidentStore:
    if request.param == "memory":
        return MemoryIncidentStore()
    return DynamoIncidentStore(request.getfixturevalue("dynamodb"), request.getfixturevalue("table"))
