"""What a Node object says: ready, labels, taints; and the controller that keeps the not-ready taint in step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from local_stack.cluster.controller import Controller
from local_stack.cluster.kubernetes.registry import NOT_READY_TAINT, Registry, now_rfc3339
from local_stack.cluster.kubernetes.resources import NODES
from local_stack.cluster.kubernetes.store import Json


def is_ready(node: Mapping[str, Any]) -> bool:
    """True where the Ready condition is True."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def is_dark(node: Mapping[str, Any]) -> bool:
    """True where nothing is heard of the node any more: nobody there stops its pods, or says what became of them."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "Unknown" for condition in conditions)


def taints_of(node: Mapping[str, Any]) -> list[Json]:
    """The node's taints."""
    return list((node.get("spec") or {}).get("taints") or [])


def set_ready(registry: Registry, node_name: str, *, ready: bool | None, reason: str) -> None:
    """Post the Ready condition, as a kubelet does; None is what the control plane writes of a node that went silent."""
    status_of = {True: "True", False: "False", None: "Unknown"}
    message_of = {
        True: "kubelet is posting ready status",
        False: "kubelet stopped",
        None: "Kubelet stopped posting node status.",
    }

    def posted(node: Json) -> Json:
        status = node.setdefault("status", {})
        others = [condition for condition in status.get("conditions") or [] if condition["type"] != "Ready"]
        now = now_rfc3339()
        condition = {
            "type": "Ready",
            "status": status_of[ready],
            "reason": reason,
            "message": message_of[ready],
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        status["conditions"] = [*others, condition]
        return node

    registry.update(NODES, "", node_name, posted, status=True)


def mark_node(
    registry: Registry,
    node_name: str,
    *,
    labels: Mapping[str, str | None],
    add_taints: Iterable[Json] = (),
    remove_taints: Iterable[Json] = (),
) -> None:
    """Set labels (None removes one) and add or remove exactly these taints; everybody else's stay."""
    added, removed = list(add_taints), [(taint["key"], taint["effect"]) for taint in remove_taints]

    def marked(node: Json) -> Json:
        current = node["metadata"].setdefault("labels", {})
        for key, value in labels.items():
            if value is None:
                current.pop(key, None)
            else:
                current[key] = value
        replaced = {(taint["key"], taint["effect"]) for taint in added} | set(removed)
        kept = [taint for taint in taints_of(node) if (taint["key"], taint["effect"]) not in replaced]
        node.setdefault("spec", {})["taints"] = [*kept, *added]
        return node

    registry.update(NODES, "", node_name, marked)


class NodeLifecycle(Controller):
    """Adds the not-ready taint to nodes that are not ready, and takes it off those that are."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "node-lifecycle")

    def reconcile(self) -> float | None:
        """One pass over all nodes."""
        nodes, _ = self.registry.select(NODES)
        key = (NOT_READY_TAINT["key"], NOT_READY_TAINT["effect"])
        for node in nodes:
            tainted = any((taint["key"], taint["effect"]) == key for taint in taints_of(node))
            if tainted == is_ready(node):
                change = {"remove_taints" if tainted else "add_taints": [dict(NOT_READY_TAINT)]}
                mark_node(self.registry, node["metadata"]["name"], labels={}, **change)
        return None
