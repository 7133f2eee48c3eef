"""``truestep drill``: a marked test alarm through the whole deployed recovery, and what became of it."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from truestep.cli.deployment import Deployment, asking_aws
from truestep.cli.errors import CommandError
from truestep.contract import (
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
    training_source,
)

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_POLL_SECONDS = 1.0
_ENDED = frozenset({"closed", "escalated"})
_NEEDS = "events:PutEvents on the event bus and dynamodb:GetItem on the table"


def drill_alarm(deployment: Deployment, cluster_arn: str, node_name: str, namespace: str | None) -> Alarm:
    """An alarm that accuses the node, marked as a drill, of a job that does not exist.

    namespace: None takes the cluster's training namespace where it has one only. Raises `CommandError` for a cluster or
    a namespace that the deployment does not serve, and for a node's name that Kubernetes has not.
    """
    if cluster_arn not in deployment.cluster_arns:
        raise CommandError(
            f"this deployment does not serve {cluster_arn!r}, but {', '.join(deployment.cluster_arns)}: give one of "
            "these, or add the cluster to the settings and deploy"
        )
    if not _NAME.fullmatch(node_name):
        raise CommandError(f"--node {node_name!r} is no name in Kubernetes; kubectl get nodes lists the nodes")
    namespace = _served_namespace(deployment, cluster_arn, namespace)
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


def _served_namespace(deployment: Deployment, cluster_arn: str, wanted: str | None) -> str:
    cluster_id = cluster_arn.rpartition("/")[2]
    parts = [source.split(".") for source in deployment.outputs["TrainingSources"].split(",")]
    served = [namespace for *_, cluster, namespace in parts if cluster == cluster_id]
    if wanted is None and len(served) == 1:
        return served[0]
    if wanted not in served:
        begin = (
            "this cluster has several training namespaces"
            if wanted is None
            else f"{wanted!r} is none of its training namespaces"
        )
        raise CommandError(
            f"{begin}: give --namespace one of {', '.join(served)}, or add another to training_namespaces and deploy"
        )
    return wanted


def send(deployment: Deployment, alarm: Alarm) -> None:
    """Put the alarm on the deployment's bus. Raises `CommandError` where the bus refuses it."""
    entry = {
        "EventBusName": deployment.outputs["EventBusName"],
        "Source": training_source(alarm.run.cluster_arn, alarm.run.namespace),
        "DetailType": str(DetailType.ALARM),
        "Detail": canonical_bytes(alarm).decode(),
    }
    with asking_aws(_NEEDS):
        (result,) = deployment.client("events").put_events(Entries=[entry])["Entries"]
    if result.get("ErrorCode"):
        raise CommandError(f"the bus refused the drill: {result['ErrorCode']}: {result.get('ErrorMessage', '')}")


def follow(deployment: Deployment, alarm: Alarm, timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """The incident, whenever its timeline has grown, until it is closed or escalated.

    Raises `CommandError` where it is neither in time.
    """
    deadline = time.monotonic() + timeout_seconds
    run, incident_id, seen = alarm.run, "", -1
    job = f"JOB#{run.cluster_arn}#{run.namespace}#{run.job_kind}#{run.job_name}#drill"
    while time.monotonic() < deadline:
        with asking_aws(_NEEDS):
            if not incident_id:
                received = deployment.item(job, f"ALARM#{alarm.alarm_id}") or {}
                incident_id = received.get("incident_id", {}).get("S", "")
            item = deployment.item(f"INCIDENT#{incident_id}") if incident_id else None
        if item is not None:
            incident: dict[str, Any] = json.loads(item["document"]["S"])
            if len(incident["timeline"]) > seen:
                seen = len(incident["timeline"])
                yield incident
            if incident["status"] in _ENDED:
                return
        time.sleep(_POLL_SECONDS)
    if incident_id:
        raise CommandError(
            f"incident {incident_id} is still open after {timeout_seconds:.0f} s; it goes on by itself: truestep "
            f"incidents show {incident_id} says where it is, and a greater --timeout-seconds waits for longer"
        )
    raise CommandError(
        f"no incident was opened after {timeout_seconds:.0f} s: look for the alarm {alarm.alarm_id} in the dead-letter "
        "queue and in the logs of receive_alarm"
    )


def shortcoming(incident: dict[str, Any]) -> str:
    """What an ended drill did not prove, and what to do about it; empty where it went all the way."""
    timeline = incident["timeline"]
    if incident["status"] == "escalated":
        stopped = next((entry for entry in reversed(timeline) if entry["outcome"] == "escalate"), None)
        why = f" at {stopped['state']}: {stopped['reason']}" if stopped else ""
        return (
            f"The recovery would have stopped{why}. Cure that and drill again. To end this drill, open the link of its "
            "message on the topic and go on from CloseIncident."
        )
    if any(entry["state"] == "ResolveNode" and entry["outcome"] == "node_gone" for entry in timeline):
        return "The cluster has no such node, so its cordon was not rehearsed: give --node of one."
    return ""
