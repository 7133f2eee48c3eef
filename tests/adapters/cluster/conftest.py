"""Fixtures: one cluster and one moto server for all tests here; a table, buckets and an environment for each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from lambdas.adapters import aws, cluster_ports
from lambdas.adapters.kubernetes import Kubernetes
from local_stack.access_keys import SECRET_ACCESS_KEY
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import (
    ACCESS_KEY,
    EKS_NAME,
    HYPERPOD_ARN,
    HYPERPOD_NAME,
    NAMESPACE,
    World,
    running_world,
    serving_eks,
    unique,
)


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def eks_url(world: World) -> Iterator[str]:
    with serving_eks(world.description) as url:
        yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, moto_url: str) -> None:
    """The recovery's access key, and moto for AWS."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for service in ("S3", "DYNAMODB", "CLOUDWATCH", "KMS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", moto_url)
    aws._client.cache_clear()
    cluster_ports._kubernetes.cache_clear()


@pytest.fixture
def s3(credentials: None) -> Any:
    return boto3.client("s3")


@pytest.fixture
def bucket(s3: Any) -> str:
    name = unique("bucket")
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def table(credentials: None) -> str:
    name = unique("incidents")
    boto3.client("dynamodb").create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "PK", "KeyType": "HASH"}, {"AttributeName": "SK", "KeyType": "RANGE"}],
        AttributeDefinitions=[
            {"AttributeName": "PK", "AttributeType": "S"},
            {"AttributeName": "SK", "AttributeType": "S"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    return name


@pytest.fixture
def decision_key(credentials: None) -> str:
    made = boto3.client("kms").create_key(KeySpec="HMAC_256", KeyUsage="GENERATE_VERIFY_MAC")
    return str(made["KeyMetadata"]["KeyId"])


@pytest.fixture
def kubernetes(access: None) -> Iterator[Kubernetes]:
    """The cluster as the recovery's role reaches it."""
    reached = cluster_ports._kubernetes(EKS_NAME, None, "us-east-1")
    yield reached
    reached.close()
    cluster_ports._kubernetes.cache_clear()


@pytest.fixture
def access(credentials: None, world: World, eks_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EKS and HyperPod answered by the cluster stand-in."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_EKS", eks_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", world.control_url)


@pytest.fixture
def recovery(
    access: None, world: World, table: str, bucket: str, decision_key: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recovery]:
    """The handlers' environment, and a way to open incidents and to run states."""
    cluster = {
        "hyperpod_cluster_name": HYPERPOD_NAME,
        "eks_cluster_name": EKS_NAME,
        "training_namespaces": [NAMESPACE],
        "checkpoint_buckets": [bucket],
    }
    monkeypatch.setenv("TRUESTEP_TABLE", table)
    monkeypatch.setenv("TRUESTEP_EVIDENCE_BUCKET", bucket)
    monkeypatch.setenv("TRUESTEP_DECISION_KEY_ID", decision_key)
    monkeypatch.setenv("TRUESTEP_CLUSTERS", json.dumps({HYPERPOD_ARN: cluster}))
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"poll_seconds": 1, "max_quarantined_nodes": 5}))
    running = Recovery(world, bucket)
    yield running
    running.clean_up()
    cluster_ports._kubernetes(EKS_NAME, None, "us-east-1").close()
    cluster_ports._kubernetes.cache_clear()
