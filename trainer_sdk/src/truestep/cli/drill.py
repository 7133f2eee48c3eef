"""``truestep drill``: a marked test alarm through the whole deployed recovery, and what became of it."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from truestep.cli.deployment import Deployment
from truestep.cli.errors import CommandError
from truestep.contract import (
    SOURCE_TRAINING,
    Alarm,
    AlarmId,
    Check,
    DetailType,
    IdentityRow,
    NodeName,
    Rank,
    RunRef,
    Step,
    Verdict,
    VerdictKind,
    canonical_bytes,
)

_CLUSTER_ARN = re.compile(r"arn:[a-z0-9-]+:sagemaker:[a-z0-9-]+:[0-9]{12}:cluster/[A-Za-z0-9-]+")
_POLL_SECONDS = 1.0
_ENDED = frozenset({"closed", "escalated"})


def drill_alarm(cluster_arn: str, node_name: str, namespace: str) -> Alarm:
    """An alarm that accuses the node, marked as a drill, of a job that does not exist. Raises `CommandError`."""
    if not _CLUSTER_ARN.fullmatch(cluster_arn):
        raise CommandError(
            f"{cluster_arn!r} is not a HyperPod cluster ARN: arn:aws:sagemaker:<region>:<account>:cluster/<id>"
        )
    drill_id = uuid.uuid4().hex
    job_name = f"truestep-drill-{drill_id[:8]}"
    where: dict[str, Any] = {"cluster_arn": cluster_arn, "region": cluster_arn.split(":")[3]}
    suspect = IdentityRow(
        rank=Rank(0), local_rank=0, node_name=NodeName(node_name), namespace=namespace, job_name=job_name, **where
    )
    run = RunRef(
        run_id=job_name,
        attempt_id=drill_id,
        world_size=3,
        namespace=namespace,
        job_name=job_name,
        job_kind="HyperPodPyTorchJob",
        **where,
    )
    return Alarm(
        alarm_id=AlarmId(drill_id),
        run=run,
        check=Check.RING_REPLAY,
        step=Step(0),
        verdict=Verdict(
            kind=VerdictKind.CONCLUSIVE,
            reason="This is a drill: nothing was detected, and nothing is changed.",
            suspects=(Rank(0),),
        ),
        suspects=(suspect,),
        clean_through=Step(0),
        detected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        drill=True,
    )


def send(deployment: Deployment, alarm: Alarm) -> None:
    """Put the alarm on the deployment's bus. Raises `CommandError` where the bus refuses it."""
    entry = {
        "EventBusName": deployment.outputs["EventBusName"],
        "Source": f"{SOURCE_TRAINING}.{alarm.run.namespace}",
        "DetailType": str(DetailType.ALARM),
        "Detail": canonical_bytes(alarm).decode(),
    }
    (result,) = deployment.client("events").put_events(Entries=[entry])["Entries"]
    if result.get("ErrorCode"):
        raise CommandError(f"the bus refused the drill: {result['ErrorCode']}: {result.get('ErrorMessage', '')}")


def follow(deployment: Deployment, alarm_id: str, timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """The incident, whenever its timeline has grown, until it is closed or escalated.

    Raises `CommandError` where it is neither in time.
    """
    deadline = time.monotonic() + timeout_seconds
    incident_id, seen = "", -1
    while time.monotonic() < deadline:
        if not incident_id:
            alarm = deployment.item(f"ALARM#{alarm_id}") or {}
            incident_id = alarm.get("incident_id", {}).get("S", "")
        item = deployment.item(f"INCIDENT#{incident_id}") if incident_id else None
        if item is not None:
            incident: dict[str, Any] = json.loads(item["document"]["S"])
            if len(incident["timeline"]) > seen:
                seen = len(incident["timeline"])
                yield incident
            if incident["status"] in _ENDED:
                return
        time.sleep(_POLL_SECONDS)
    where = f"incident {incident_id} is still open" if incident_id else "no incident was opened"
    raise CommandError(
        f"{where} after {timeout_seconds:.0f} s: look for the alarm {alarm_id} in the dead-letter queue and in the "
        "logs of receive_alarm"
    )
