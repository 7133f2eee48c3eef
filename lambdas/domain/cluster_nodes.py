"""Quarantine of a Kubernetes node: what to write so that nothing new lands on it, and how to take back only that.

Pure. Nodes are JSON documents as the API server returns them. Every plan is one JSON-patch guarded by a ``test`` of
resourceVersion, because a merge patch of ``spec.taints`` replaces the whole list, HyperPod's own taints included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from truestep.contract import parse_json

QUARANTINE_KEY = "truestep.ai/quarantine"
"""Key of both the taint (value: incident id, effect NoSchedule) and the annotation (value: `QuarantineMark`)."""
FIELD_MANAGER = "truestep-recovery"
"""What the recovery calls itself in its writes, so that the API server notes which fields it has set."""
_ANNOTATION_POINTER = "/metadata/annotations/truestep.ai~1quarantine"

Patch = tuple[Mapping[str, Any], ...]
"""JSON-patch operations (RFC 6902)."""


@dataclass(frozen=True, kw_only=True)
class QuarantineMark:
    """The annotation's content: who quarantined the node, and how it was before."""

    incident_id: str
    previous_unschedulable: bool
    at: str
    """ISO 8601, UTC."""

    def to_annotation(self) -> str:
        return json.dumps(
            {"incident_id": self.incident_id, "previous_unschedulable": self.previous_unschedulable, "at": self.at},
            sort_keys=True,
        )


class CordonAction(StrEnum):
    """What a cordon plan does."""

    CORDON = "cordon"
    """The node accepted pods until now; the patch stops that."""
    MARK_ONLY = "mark_only"
    """Somebody else had cordoned it: their cordon is left as it is, our taint is added."""
    NOTHING = "nothing"
    """Already as this incident wants it."""
    LEAVE = "leave"
    """Another incident holds the node."""


@dataclass(frozen=True, kw_only=True)
class CordonPlan:
    """The write that quarantines a node, and why; an empty patch writes nothing."""

    action: CordonAction
    reason: str
    patch: Patch = ()
    theirs: bool = False
    """The cordon (``spec.unschedulable``) belongs to somebody else."""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """The write that takes this incident's quarantine off a node, and why; an empty patch writes nothing."""

    released: bool
    reason: str
    patch: Patch = ()


def read_mark(node: Mapping[str, Any]) -> QuarantineMark | None:
    """The node's quarantine mark; None without one. A mark that does not parse belongs to nobody we know: also None."""
    text = (node["metadata"].get("annotations") or {}).get(QUARANTINE_KEY)
    if text is None:
        return None
    try:
        document = parse_json(text)
        return QuarantineMark(
            incident_id=str(document["incident_id"]),
            previous_unschedulable=bool(document["previous_unschedulable"]),
            at=str(document["at"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def plan_cordon(node: Mapping[str, Any], incident_id: str, at: str) -> CordonPlan:
    """Quarantine the node for the incident, once: a second plan on the result does nothing.

    at: ISO 8601, UTC. A node that this incident had cordoned and somebody un-cordoned since is cordoned again.
    """
    name = node["metadata"]["name"]
    holder = _foreign_holder(node, incident_id)
    if holder:
        return CordonPlan(
            action=CordonAction.LEAVE,
            theirs=True,
            reason=f"{name} is already quarantined by {holder}; its quarantine is left as it is",
        )
    mark = read_mark(node)
    ours = mark is not None and mark.incident_id == incident_id
    unschedulable = bool(node.get("spec", {}).get("unschedulable"))
    previous = mark.previous_unschedulable if ours and mark is not None else unschedulable
    operations: list[Mapping[str, Any]] = []
    if not ours:
        new_mark = QuarantineMark(incident_id=incident_id, previous_unschedulable=previous, at=at)
        operations += _set_annotation(node, new_mark.to_annotation())
    operations += _add_taint(node, incident_id)
    if not unschedulable and not previous:
        operations.append({"op": "add", "path": "/spec/unschedulable", "value": True})
    if not operations:
        return CordonPlan(
            action=CordonAction.NOTHING, theirs=previous, reason=f"{name} is already quarantined by this incident"
        )
    patch = (_guard(node), *operations)
    if previous:
        reason = f"{name} had been cordoned by somebody else: that cordon is left, the taint of this incident is added"
        return CordonPlan(action=CordonAction.MARK_ONLY, theirs=True, reason=reason, patch=patch)
    return CordonPlan(
        action=CordonAction.CORDON, reason=f"{name} is cordoned and tainted: no new pod lands on it", patch=patch
    )


def plan_release(node: Mapping[str, Any], incident_id: str) -> ReleasePlan:
    """Take off what this incident put on, and nothing else; a second plan on the result does nothing.

    A cordon is this incident's where the API server says that the recovery set it: the one that it had set may have
    been taken off, and another one been set by somebody else since.
    """
    name = node["metadata"]["name"]
    mark = read_mark(node)
    if mark is None or mark.incident_id != incident_id:
        owner = f"incident {mark.incident_id}" if mark else "nobody"
        return ReleasePlan(
            released=False, reason=f"{name} carries the quarantine mark of {owner}, not of this incident: left alone"
        )
    operations: list[Mapping[str, Any]] = [{"op": "remove", "path": _ANNOTATION_POINTER}]
    taints = node.get("spec", {}).get("taints") or []
    ours = [index for index, taint in enumerate(taints) if _is_quarantine(taint) and taint.get("value") == incident_id]
    # From the end, because every removal shifts the indices behind it.
    operations += [{"op": "remove", "path": f"/spec/taints/{index}"} for index in reversed(ours)]
    reason = f"{name} is released: the taint and the cordon of this incident are gone"
    if mark.previous_unschedulable:
        reason = f"{name}: the taint of this incident is gone, the cordon that somebody else had set before is left"
    elif node["spec"].get("unschedulable"):
        setters = _cordon_setters(node)
        if setters == {FIELD_MANAGER}:
            operations.append({"op": "remove", "path": "/spec/unschedulable"})
        else:
            reason = f"{name}: the taint of this incident is gone, the cordon is left: {_whose(setters, name)}"
    else:
        reason = (
            f"{name} had been un-cordoned by somebody else since; only the taint of this incident was left to remove"
        )
    return ReleasePlan(released=True, reason=reason, patch=(_guard(node), *operations))


def opened_since(node: Mapping[str, Any], incident_id: str) -> str:
    """What somebody has taken off of this incident's quarantine since; empty where it is whole.

    Ask it of a node that the incident has closed itself.
    """
    name = node["metadata"]["name"]
    mark = read_mark(node)
    if mark is None or mark.incident_id != incident_id:
        return f"the quarantine mark of this incident has been taken off {name}"
    if mark.previous_unschedulable:
        return ""
    if not node.get("spec", {}).get("unschedulable"):
        return f"{name} has been un-cordoned since this incident closed it"
    setters = _cordon_setters(node)
    if setters and FIELD_MANAGER not in setters:
        return f"{name} has been un-cordoned since this incident closed it, and cordoned anew: {_whose(setters, name)}"
    return ""


def _cordon_setters(node: Mapping[str, Any]) -> set[str]:
    """Who has set the cordon, as the API server noted it (``managedFields``); empty where it has not."""
    return {
        str(entry.get("manager"))
        for entry in node["metadata"].get("managedFields") or []
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    }


def _whose(setters: set[str], name: str) -> str:
    others = sorted(setters - {FIELD_MANAGER})
    if others:
        return f"it is somebody else's, set by {', '.join(others)}"
    return f"the API server does not say who set it; if nobody else needs it, kubectl uncordon {name}"


def is_schedulable(node: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the node is Ready and takes ordinary pods, and what is in the way."""
    name = node["metadata"]["name"]
    conditions = {entry["type"]: entry["status"] for entry in node.get("status", {}).get("conditions") or []}
    if conditions.get("Ready") != "True":
        return False, f"{name} is not Ready (condition is {conditions.get('Ready', 'missing')})"
    if node.get("spec", {}).get("unschedulable"):
        return False, f"{name} is Ready but cordoned"
    blocking = [
        taint["key"]
        for taint in node.get("spec", {}).get("taints") or []
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not _is_accelerator_taint(taint["key"])
    ]
    if blocking:
        return False, f"{name} is Ready but tainted with {', '.join(sorted(blocking))}"
    return True, f"{name} is Ready and takes pods"


def _is_accelerator_taint(key: str) -> bool:
    """GPU nodes are often tainted for good so that only GPU pods, which tolerate it, land there."""
    return key.endswith(("/gpu", "/efa", "/neuron"))


def _is_quarantine(taint: Mapping[str, Any]) -> bool:
    return bool(taint.get("key") == QUARANTINE_KEY)


def _foreign_holder(node: Mapping[str, Any], incident_id: str) -> str:
    mark = read_mark(node)
    if mark is not None and mark.incident_id != incident_id:
        return f"incident {mark.incident_id}"
    for taint in node.get("spec", {}).get("taints") or []:
        if _is_quarantine(taint) and taint.get("value") != incident_id:
            return f"incident {taint.get('value') or 'unknown'}"
    return ""


def _guard(node: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"op": "test", "path": "/metadata/resourceVersion", "value": node["metadata"]["resourceVersion"]}


def _set_annotation(node: Mapping[str, Any], value: str) -> list[Mapping[str, Any]]:
    if node["metadata"].get("annotations") is None:
        return [{"op": "add", "path": "/metadata/annotations", "value": {QUARANTINE_KEY: value}}]
    return [{"op": "add", "path": _ANNOTATION_POINTER, "value": value}]


def _add_taint(node: Mapping[str, Any], incident_id: str) -> list[Mapping[str, Any]]:
    taint = {"key": QUARANTINE_KEY, "value": incident_id, "effect": "NoSchedule"}
    taints = node.get("spec", {}).get("taints")
    if any(_is_quarantine(entry) for entry in taints or []):
        return []
    if taints is None:
        return [{"op": "add", "path": "/spec/taints", "value": [taint]}]
    return [{"op": "add", "path": "/spec/taints/-", "value": taint}]
