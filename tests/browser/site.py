"""The deployed approval page, and incidents that wait for a person there."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lambdas.adapters.approval_links import KmsLinks
from lambdas.adapters.metrics_evidence import EvidenceBucket
from lambdas.adapters.store import DynamoIncidentStore
from lambdas.domain.incident import Incident, iso, open_incident
from lambdas.domain.metrics_comparison import TEMPERATURE, XID
from lambdas.domain.records import Cordon, Evidence, HealthCheck, HealthCheckStatus, PastIncident
from local_stack import LocalStack
from tests.unit.recovery.alarms import an_alarm
from truestep.contract import Alarm

STAGE = "browser"
PATIENCE_SECONDS = 20.0
FINDING = "GPU-00000002: 9 K hotter than the median of the node's other GPUs"
NO_DATA = "no data: the workspace has no series of this GPU in the window; that says nothing about the GPU"
# The one state of the recovery that asks, with its real function and a real token.
_WAITS = {
    "StartAt": "RequestApproval",
    "States": {
        "RequestApproval": {
            "Type": "Task",
            "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken",
            "Parameters": {
                "FunctionName": f"truestep-{STAGE}-request-approval",
                "Payload": {"incident_id.$": "$.incident_id", "task_token.$": "$$.Task.Token"},
            },
            "End": True,
        }
    },
}


class Site:
    """One deployment."""

    def __init__(self, stack: LocalStack, directory: Path) -> None:
        self.stack = stack
        self.outputs = directory / "outputs.json"
        self.outputs.write_text(json.dumps({f"truestep-{STAGE}": dict(stack.outputs)}))
        self.store = DynamoIncidentStore(stack.client("dynamodb"), stack.outputs["TableName"])
        self._sfn = stack.client("stepfunctions")
        role = "arn:aws:iam::123456789012:role/waits"
        machine = self._sfn.create_state_machine(name="waits", definition=json.dumps(_WAITS), roleArn=role)
        self._machine: str = machine["stateMachineArn"]

    def incident(self, name: str, *, now: datetime | None = None, **alarm: Any) -> Incident:
        """An incident with everything on record that a page can show. `name` makes it another one."""
        now = now or datetime.now(UTC)
        made = an_alarm(job_name=name, cluster_arn=self.stack.outputs["ClusterArns"])
        made = dataclasses.replace(
            made, alarm_id=f"{name}-alarm", detected_at=iso(now - timedelta(minutes=12)), **alarm
        )
        incident = self.store.open(open_incident(made, now=now - timedelta(minutes=11), dry_run=False))
        for number, suspect in enumerate(incident.suspects):
            cordoned = dataclasses.replace(
                suspect,
                instance_id=f"i-0f00ba4{number}",
                instance_group="workers",
                group_nodes=24,
                cordon=Cordon(at=iso(now - timedelta(minutes=11)), ours=True),
            )
            incident = incident.with_suspect(cordoned)
        incident = incident.evolve(
            evidence=self._evidence(incident, made),
            history=(
                PastIncident(
                    incident_id="inc-00000000000000aa",
                    gpu_uuid="GPU-00000002",
                    node_name="hyperpod-i-00000000000000002",
                    verdict_kind="conclusive",
                    at=iso(now - timedelta(days=9)),
                ),
            ),
            health_check=HealthCheck(status=HealthCheckStatus.PASSED, reason="DCGM level 4 and connectivity"),
        )
        for minutes, (state, outcome) in zip(range(11, 0, -2), _ANSWERS, strict=False):
            at = now - timedelta(minutes=minutes)
            incident = incident.noted(at=at, state=state, outcome=outcome, reason="as the story says")
        return self.store.save(incident)

    def ask(self, incident: Incident) -> tuple[str, str]:
        """Enter RequestApproval; returns the link of the message, and the execution that waits."""
        name = incident.incident_id
        started = self._sfn.start_execution(
            stateMachineArn=self._machine, name=name, input=json.dumps({"incident_id": name})
        )
        return self._link(incident.incident_id), started["executionArn"]

    def expired_link(self, incident: Incident) -> str:
        """A genuine link whose time is over."""
        return self.link(incident, lasts=timedelta(seconds=-1))

    def link(self, incident: Incident, *, lasts: timedelta = timedelta(hours=1)) -> str:
        """A genuine link, as a message has it."""
        (function,) = [one for one in self.stack.deployment.functions if one.name.endswith("decide-approval")]
        links = KmsLinks(
            self.stack.client("kms"), function.environment["TRUESTEP_HMAC_KEY_ID"], self.stack.outputs["ApprovalUrl"]
        )
        return links.url(incident.incident_id, expires_at=datetime.now(UTC) + lasts)

    def outcome(self, execution: str) -> dict[str, Any]:
        """What the waiting state ended with; waits for it, there is no other way than to ask."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (seen := self._sfn.describe_execution(executionArn=execution))["status"] == "RUNNING":
            assert time.monotonic() < deadline, "the state still waits"
            time.sleep(0.05)
        answer: dict[str, Any] = json.loads(seen["output"])
        return answer

    def waits(self, execution: str) -> bool:
        return bool(self._sfn.describe_execution(executionArn=execution)["status"] == "RUNNING")

    def _evidence(self, incident: Incident, alarm: Alarm) -> Evidence:
        bucket = EvidenceBucket(self.stack.client("s3"), self.stack.outputs["EvidenceBucketName"], incident.incident_id)
        uri = bucket.put("dcgm-GPU-00000002", metrics_document(alarm.detected_at))
        items = {"dcgm-GPU-00000002": uri, "dcgm-GPU-00000009": NO_DATA}
        return Evidence(uri=bucket.put_index({}), items=items, findings=(FINDING,))

    def _link(self, incident_id: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            text = "\n".join(message["Message"] for message in self.stack.sns_messages())
            if found := re.findall(rf"http://\S+/incidents/{incident_id}\?\S+", text):
                return str(found[-1])
            assert time.monotonic() < deadline, f"no message with the link of {incident_id}"
            time.sleep(0.05)


_ANSWERS = (
    ("CordonNode", "cordoned"),
    ("SnapshotEvidence", "recorded"),
    ("StopTraining", "stopped"),
    ("ReadHistory", "read"),
    ("ConfirmSuspect", "skipped"),
    ("StartHealthCheck", "started"),
)


def metrics_document(detected_at: str) -> dict[str, Any]:
    """What SnapshotEvidence keeps of a GPU: it gets hotter before the alarm, its power is unknown, and samples miss."""
    alarm = datetime.fromisoformat(detected_at.replace("Z", "+00:00"))
    times = [alarm.timestamp() - 3600 + 30 * index for index in range(140)]
    hot = [[at, str(61 + 9 * (index > 90) + index % 3 / 2)] for index, at in enumerate(times) if not 30 < index < 50]
    peers = [[[at, str(60 + peer / 3 + index % 2)] for index, at in enumerate(times)] for peer in range(7)]
    return {
        "gpu_uuid": "GPU-00000002",
        "alarm": iso(alarm),
        "start": iso(alarm - timedelta(hours=1)),
        "end": iso(alarm + timedelta(minutes=10)),
        "step_seconds": 30,
        "series": [
            {"metric": {"__name__": TEMPERATURE, "UUID": "GPU-00000002"}, "values": hot},
            {"metric": {"__name__": XID, "UUID": "GPU-00000002"}, "values": [[at, "0"] for at in times]},
        ],
        "peer_temperatures": [
            {"metric": {"__name__": TEMPERATURE, "UUID": f"GPU-peer-{index}"}, "values": values}
            for index, values in enumerate(peers)
        ],
    }
