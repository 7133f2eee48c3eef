"""Lists as kubectl shows them (`Accept: application/json;as=Table`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from local_stack.cluster.kubernetes.resources import Resource
from local_stack.cluster.kubernetes.store import Json

Cells = Callable[[Json], list[str]]


def age(body: Json) -> str:
    """Time since creation, in the largest unit that gives at least two, as kubectl writes it."""
    created = datetime.strptime(body["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    seconds = max(0, int((datetime.now(UTC) - created).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _true_condition(body: Mapping[str, Any]) -> str:
    conditions = (body.get("status") or {}).get("conditions") or []
    return next((item["type"] for item in reversed(conditions) if item["status"] == "True"), "")


def _node(node: Json) -> list[str]:
    ready = "Ready" if _true_condition({"status": {"conditions": _ready_only(node)}}) else "NotReady"
    spec = node.get("spec") or {}
    status = f"{ready},SchedulingDisabled" if spec.get("unschedulable") else ready
    taints = ",".join(f"{taint['key']}:{taint['effect']}" for taint in spec.get("taints") or [])
    return [status, taints or "<none>"]


def _ready_only(node: Json) -> list[Json]:
    conditions = (node.get("status") or {}).get("conditions") or []
    return [condition for condition in conditions if condition["type"] == "Ready"]


def _pod(pod: Json) -> list[str]:
    status = pod.get("status") or {}
    shown = "Terminating" if "deletionTimestamp" in pod["metadata"] else status.get("phase", "Pending")
    ready = sum(bool(container.get("ready")) for container in status.get("containerStatuses") or [])
    return [f"{ready}/{len(pod['spec']['containers'])}", shown, pod["spec"].get("nodeName") or "<none>"]


def _training_job(job: Json) -> list[str]:
    suspended = (job["spec"].get("runPolicy") or {}).get("suspend", False)
    return [_true_condition(job), str(suspended).lower(), str((job.get("status") or {}).get("restartCount", 0))]


def _event(event: Json) -> list[str]:
    subject = event["involvedObject"]
    return [event.get("type", ""), event["reason"], f"{subject['kind'].lower()}/{subject['name']}", event["message"]]


_COLUMNS: Mapping[str, tuple[tuple[str, ...], Cells]] = {
    "Node": (("Status", "Taints"), _node),
    "Pod": (("Ready", "Status", "Node"), _pod),
    "HyperPodPyTorchJob": (("State", "Suspended", "Restarts"), _training_job),
    "Event": (("Type", "Reason", "Object", "Message"), _event),
}


def as_table(resource: Resource, bodies: list[Json], metadata: Json) -> Json:
    """The `Table` of these objects: name, what matters of the kind, age."""
    names, cells = _COLUMNS.get(resource.kind, ((), lambda _body: []))
    columns = [
        {"name": name, "type": "string", "format": "name" if name == "Name" else "", "description": "", "priority": 0}
        for name in ("Name", *names, "Age")
    ]
    rows = [
        {
            "cells": [body["metadata"]["name"], *cells(body), age(body)],
            # What kubectl needs of the object itself: enough to name it.
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": body["metadata"],
            },
        }
        for body in bodies
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": columns,
        "rows": rows,
    }


def wants_table(accept: str) -> bool:
    """Whether the client prefers a table."""
    return "as=Table" in accept and "g=meta.k8s.io" in accept
