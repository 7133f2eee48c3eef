"""Binds pods to nodes as the default scheduler would, as far as training pods can tell the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from local_stack.cluster.controller import Controller
from local_stack.cluster.events import record_event
from local_stack.cluster.job_forms import is_job_pod
from local_stack.cluster.kubernetes.registry import Registry, now_rfc3339
from local_stack.cluster.kubernetes.resources import NODES, PODS
from local_stack.cluster.kubernetes.store import Json
from local_stack.cluster.node_state import is_ready, taints_of

GPU = "nvidia.com/gpu"
_FINISHED = ("Succeeded", "Failed")
_CORDONED: Json = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
"""What a cordon amounts to: a pod that tolerates this taint is bound to a cordoned node all the same."""


def _tolerates(tolerations: list[Json], taint: Json) -> bool:
    for toleration in tolerations:
        if toleration.get("effect") not in (None, "", taint["effect"]):
            continue
        if toleration.get("operator", "Equal") == "Exists":
            if toleration.get("key") in (None, "", taint["key"]):
                return True
        elif toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""):
            return True
    return False


def _expression_matches(expression: Json, values: Mapping[str, str]) -> bool:
    key, operator, wanted = expression["key"], expression["operator"], expression.get("values") or []
    match operator:
        case "In":
            return values.get(key) in wanted
        case "NotIn":
            return values.get(key) not in wanted
        case "Exists":
            return key in values
        case "DoesNotExist":
            return key not in values
    return False


def _affinity_matches(spec: Json, node: Json) -> bool:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    labels = node["metadata"].get("labels") or {}
    names = {"metadata.name": node["metadata"]["name"]}
    return any(
        all(_expression_matches(expression, labels) for expression in term.get("matchExpressions") or [])
        and all(_expression_matches(expression, names) for expression in term.get("matchFields") or [])
        for term in required.get("nodeSelectorTerms") or []
    )


def gpus_requested(pod: Mapping[str, Any]) -> int:
    """GPUs that the pod's containers ask for (limits count as requests, as for every extended resource)."""
    total = 0
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        amount = (resources.get("requests") or {}).get(GPU) or (resources.get("limits") or {}).get(GPU) or 0
        total += int(amount)
    return total


def refusal(pod: Mapping[str, Any], node: Json, neighbours: list[Json]) -> str | None:
    """Why the pod cannot run on the node, in the scheduler's words, or None where it can.

    neighbours: the unfinished pods on the node. A node takes one pod of a training job, whatever it requests:
    those jobs own their instances.
    """
    spec = pod["spec"]
    if not is_ready(node):
        return "node(s) were not ready"
    tolerations = spec.get("tolerations") or []
    if (node.get("spec") or {}).get("unschedulable") and not _tolerates(tolerations, _CORDONED):
        return "node(s) were unschedulable"
    for taint in taints_of(node):
        if taint["effect"] != "PreferNoSchedule" and not _tolerates(tolerations, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    labels = node["metadata"].get("labels") or {}
    selector = spec.get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()) or not _affinity_matches(spec, node):
        return "node(s) didn't match Pod's node affinity/selector"
    capacity = int(((node.get("status") or {}).get("allocatable") or {}).get(GPU, 0))
    if gpus_requested(pod) > capacity - sum(gpus_requested(other) for other in neighbours):
        return f"Insufficient {GPU}"
    if is_job_pod(pod) and any(is_job_pod(other) for other in neighbours):
        return "node(s) already run a training pod"
    return None


class Scheduler(Controller):
    """Puts every pending pod on the least loaded node that takes it; says on the pod why none does."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "scheduler")

    def reconcile(self) -> float | None:
        """One pass over the unscheduled pods, oldest first."""
        pods, _ = self.registry.select(PODS)
        nodes, _ = self.registry.select(NODES)
        active = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _FINISHED]
        on_node: dict[str, list[Json]] = {node["metadata"]["name"]: [] for node in nodes}
        for pod in active:
            on_node.setdefault(pod["spec"].get("nodeName", ""), []).append(pod)
        waiting = [
            pod for pod in active if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
        ]
        waiting.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))
        for pod in waiting:
            self._place(pod, nodes, on_node)
        return None

    def _place(self, pod: Json, nodes: list[Json], on_node: dict[str, list[Json]]) -> None:
        refusals: Counter[str] = Counter()
        feasible = []
        for node in nodes:
            name = node["metadata"]["name"]
            why = refusal(pod, node, on_node[name])
            if why is None:
                feasible.append((len(on_node[name]), name))
            else:
                refusals[why] += 1
        if feasible:
            _, chosen = min(feasible)
            self._bind(pod, chosen)
            on_node[chosen].append(pod)
        else:
            reasons = ", ".join(f"{count} {why}" for why, count in sorted(refusals.items()))
            self._report_unschedulable(pod, f"0/{len(nodes)} nodes are available: {reasons or 'there are none'}.")

    def _bind(self, pod: Json, node_name: str) -> None:
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]

        def bound(current: Json) -> Json:
            if current["metadata"]["uid"] == metadata["uid"]:
                current["spec"]["nodeName"] = node_name
            return current

        self.registry.update(PODS, namespace, name, bound, binding=True)
        self._set_condition(pod, {"type": "PodScheduled", "status": "True"})
        record_event(
            self.registry, pod, "Scheduled", f"Successfully assigned {namespace}/{name} to {node_name}",
            component="default-scheduler",
        )  # fmt: skip

    def _report_unschedulable(self, pod: Json, message: str) -> None:
        conditions = (pod.get("status") or {}).get("conditions") or []
        if any(condition.get("message") == message for condition in conditions):
            return
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._set_condition(pod, condition)
        record_event(self.registry, pod, "FailedScheduling", message, component="default-scheduler", warning=True)

    def _set_condition(self, pod: Json, condition: Json) -> None:
        stamped = {**condition, "lastTransitionTime": now_rfc3339()}

        def posted(current: Json) -> Json:
            status = current.setdefault("status", {})
            others = [item for item in status.get("conditions") or [] if item["type"] != condition["type"]]
            status["conditions"] = [*others, stamped]
            return current

        self.registry.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], posted, status=True)
