"""Alarms, identities and a bus that shows what arrived, for the tests of reporting."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any

import truestep.contract
from truestep.contract import Alarm, IdentityRow, NodeName, Rank, RunRef, Verdict, VerdictKind

GOLDEN = Path(truestep.contract.__file__).parent / "golden" / "alarm-v1.valid.conclusive.json"
RUN = RunRef(
    run_id="run",
    attempt_id="attempt",
    world_size=4,
    cluster_arn="arn:aws:sagemaker:eu-central-1:111122223333:cluster/abc123def456",
    region="eu-central-1",
    namespace="research",
)


def an_alarm(**changes: Any) -> Alarm:
    """The golden alarm with an id of its own and `changes`."""
    alarm = Alarm.from_json(json.loads(GOLDEN.read_text()))
    return dataclasses.replace(alarm, **{"alarm_id": uuid.uuid4().hex, **changes})


def accusing_nobody(kind: VerdictKind, **changes: Any) -> Alarm:
    """An alarm whose verdict has no suspects."""
    return an_alarm(verdict=Verdict(kind=kind, reason="every rank computes it"), suspects=(), **changes)


def identity(rank: int = 0) -> IdentityRow:
    """A rank on a node of its own."""
    return IdentityRow(rank=Rank(rank), local_rank=0, node_name=NodeName(f"node-{rank}"))


@dataclasses.dataclass
class Bus:
    """A bus whose rule puts every event into a queue, so that a test sees what arrived."""

    name: str
    queue_url: str
    sqs: Any

    @classmethod
    def create(cls) -> Bus:
        """A new bus on the server that the environment names."""
        import boto3

        name = f"bus-{uuid.uuid4().hex[:8]}"
        events, sqs = boto3.client("events"), boto3.client("sqs")
        events.create_event_bus(Name=name)
        queue_url = sqs.create_queue(QueueName=name)["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        events.put_rule(Name="all", EventBusName=name, EventPattern=json.dumps({"source": [{"prefix": "truestep."}]}))
        events.put_targets(Rule="all", EventBusName=name, Targets=[{"Id": "queue", "Arn": arn}])
        return cls(name, queue_url, sqs)

    def received(self) -> list[dict[str, Any]]:
        """What has arrived since the last call."""
        bodies: list[dict[str, Any]] = []
        while messages := self.sqs.receive_message(QueueUrl=self.queue_url, MaxNumberOfMessages=10).get("Messages"):
            for message in messages:
                bodies.append(json.loads(message["Body"]))
                self.sqs.delete_message(QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"])
        return bodies
