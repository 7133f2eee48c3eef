"""The handlers against moto's DynamoDB, KMS, SNS, S3 and Step Functions, with task tokens of a real execution."""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from moto.core.config import default_user_config
from moto.server import ThreadedMotoServer

from lambdas.adapters.store import DynamoIncidentStore
from lambdas.domain.cluster_resolution import claimed
from lambdas.domain.incident import Incident, open_incident
from tests.unit.recovery.alarms import CLUSTER_ARN, NOW, an_alarm

CLUSTER = {"hyperpod_cluster_name": "hp", "eks_cluster_name": "eks", "training_namespaces": ["team-a"]}

ACCOUNT = "123456789012"


@functools.cache
def _client(url: str, service: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


@dataclass(frozen=True)
class Cloud:
    """moto's services and what the functions are configured with."""

    url: str
    table: str
    bucket: str
    topic_arn: str
    queue_url: str
    key_id: str
    decision_key_id: str
    state_machine_arn: str
    approve_machine_arn: str
    token_queue_url: str

    def client(self, service: str) -> Any:
        return _client(self.url, service)

    @property
    def store(self) -> DynamoIncidentStore:
        return DynamoIncidentStore(self.client("dynamodb"), self.table)

    def messages(self) -> list[dict[str, Any]]:
        """What was published since the last call."""
        found: list[dict[str, Any]] = []
        while batch := self._receive(self.queue_url):
            found += [json.loads(message["Body"]) for message in batch]
        return found

    def _receive(self, queue_url: str) -> list[dict[str, Any]]:
        sqs = self.client("sqs")
        batch: list[dict[str, Any]] = sqs.receive_message(QueueUrl=queue_url, MaxNumberOfMessages=10).get(
            "Messages", []
        )
        for message in batch:
            sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])
        return batch

    def waiting_execution(self) -> tuple[str, str]:
        """ARN and task token of an execution that waits in a token task."""
        sfn = self.client("stepfunctions")
        definition = {
            "StartAt": "Wait",
            "States": {
                "Wait": {
                    "Type": "Task",
                    "Resource": "arn:aws:states:::sqs:sendMessage.waitForTaskToken",
                    "Parameters": {"QueueUrl": self.token_queue_url, "MessageBody": {"token.$": "$$.Task.Token"}},
                    "End": True,
                }
            },
        }
        machine = sfn.create_state_machine(
            name=f"wait-{uuid.uuid4().hex[:8]}",
            definition=json.dumps(definition),
            roleArn=f"arn:aws:iam::{ACCOUNT}:role/r",
        )
        execution = sfn.start_execution(stateMachineArn=machine["stateMachineArn"], input="{}")["executionArn"]
        sqs = self.client("sqs")
        (message,) = sqs.receive_message(QueueUrl=self.token_queue_url, WaitTimeSeconds=10)["Messages"]
        sqs.delete_message(QueueUrl=self.token_queue_url, ReceiptHandle=message["ReceiptHandle"])
        return execution, json.loads(message["Body"])["token"]

    def output(self, execution_arn: str) -> dict[str, Any] | None:
        """The execution's output once its task has ended; waits for that in the history, at most 10 s."""
        sfn = self.client("stepfunctions")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            seen = sfn.describe_execution(executionArn=execution_arn)
            if seen["status"] != "RUNNING":
                answer: dict[str, Any] = json.loads(seen["output"])
                return answer
            time.sleep(0.05)
        return None

    def still_waits(self, execution_arn: str) -> bool:
        return bool(self.client("stepfunctions").describe_execution(executionArn=execution_arn)["status"] == "RUNNING")


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    default_user_config["stepfunctions"] = {"execute_state_machine": True}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    patch.setenv("MOTO_PORT", str(port))
    yield f"http://{host}:{port}"
    patch.undo()
    server.stop()


@pytest.fixture
def cloud(moto_server: str, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    for name, value in {
        "AWS_ENDPOINT_URL": moto_server,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    made = _made(moto_server, uuid.uuid4().hex[:8])
    for name, value in {
        "TRUESTEP_TABLE": made.table,
        "TRUESTEP_EVIDENCE_BUCKET": made.bucket,
        "TRUESTEP_TOPIC_ARN": made.topic_arn,
        "TRUESTEP_HMAC_KEY_ID": made.key_id,
        "TRUESTEP_DECISION_KEY_ID": made.decision_key_id,
        "TRUESTEP_APPROVAL_URL": "https://approval.example",
        "TRUESTEP_STATE_MACHINE_ARN": made.state_machine_arn,
        "TRUESTEP_APPROVE_STATE_MACHINE_ARN": made.approve_machine_arn,
        "TRUESTEP_CLUSTERS": json.dumps({CLUSTER_ARN: CLUSTER}),
        "TRUESTEP_POLICY": "{}",
    }.items():
        monkeypatch.setenv(name, value)
    return made


def _made(url: str, suffix: str) -> Cloud:
    client = functools.partial(_client, url)
    table, bucket = f"incidents-{suffix}", f"evidence-{suffix}"
    client("dynamodb").create_table(
        TableName=table,
        KeySchema=[{"AttributeName": "PK", "KeyType": "HASH"}, {"AttributeName": "SK", "KeyType": "RANGE"}],
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("PK", "SK")],
        BillingMode="PAY_PER_REQUEST",
    )
    client("s3").create_bucket(Bucket=bucket)
    queue_url = client("sqs").create_queue(QueueName=f"subscriber-{suffix}")["QueueUrl"]
    topic_arn = client("sns").create_topic(Name=f"topic-{suffix}")["TopicArn"]
    queue_arn = f"arn:aws:sqs:us-east-1:{ACCOUNT}:subscriber-{suffix}"
    client("sns").subscribe(TopicArn=topic_arn, Protocol="sqs", Endpoint=queue_arn)
    keys = [
        client("kms").create_key(KeySpec="HMAC_256", KeyUsage="GENERATE_VERIFY_MAC")["KeyMetadata"]["KeyId"]
        for _ in ("links", "decisions")
    ]
    waits = {"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 300, "End": True}}}
    machines = [
        client("stepfunctions").create_state_machine(
            name=f"{name}-{suffix}", definition=json.dumps(waits), roleArn=f"arn:aws:iam::{ACCOUNT}:role/r"
        )["stateMachineArn"]
        for name in ("recovery", "approve")
    ]
    tokens = client("sqs").create_queue(QueueName=f"tokens-{suffix}")["QueueUrl"]
    return Cloud(url, table, bucket, topic_arn, queue_url, *keys, *machines, tokens)


@pytest.fixture
def incident(cloud: Cloud) -> Incident:
    """An open incident in the table, whose suspect is claimed."""
    opened = open_incident(an_alarm(), now=NOW, dry_run=False)
    return cloud.store.open(opened.evolve(suspects=claimed(opened.suspects)))
