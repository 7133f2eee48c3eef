"""The Kubernetes Job that runs a failing computation again on one node: its manifest, and how far it is. Pure.

It is made from the training's own pod (`cluster_workload`), so that image, user, volumes and identity are those of the
run.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lambdas.domain.cluster_adoption import misplaced
from lambdas.domain.cluster_jobs import CONFIRMATION_LABEL, KUEUE_QUEUE_LABEL, queue_of
from lambdas.domain.cluster_nodes import QUARANTINE_KEY
from lambdas.domain.policy import Policy
from lambdas.domain.records import ConfirmedNode, Workload
from truestep.contract import REPORT_BYTES, ContractError, parse_json, read_report

ALARM_ANNOTATION: Final = "truestep.ai/alarm"
CONTAINER: Final = "confirm"
REPORT_PATH: Final = "/dev/termination-log"
PLACED_WITHIN_SECONDS: Final = 300
"""Longer a suspect's pod does not wait for a place or its image: a person waits for the question meanwhile."""
COMPARISON_PLACED_WITHIN_SECONDS: Final = 60
MARKER_WAIT_SECONDS: Final = 120
LATE_MARKER_WAIT_SECONDS: Final = 30
"""For a bundle that was not finished at its alarm. StopTraining has ended who was to finish it: only what a file system
shows late is waited for (an NFS client may believe for so long that a directory has not changed: acdirmin)."""
OVERDUE_SECONDS: Final = 60
"""The Job ends itself; after this much more the workflow stops looking."""
KEPT_SECONDS: Final = 3_600
"""A finished Job is gone after so long, even where nothing deleted it."""

_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_HEALTH = "sagemaker.amazonaws.com/node-health-status"
_QUARANTINES = (QUARANTINE_KEY, _UNSCHEDULABLE, _HEALTH)
_CANNOT_START = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of the Jobs is to run. node_name: empty for a healthy node, which the scheduler chooses."""

    node_name: str
    gpus: int
    instance_type: str = ""
    avoid: tuple[str, ...] = ()
    """Nodes that are under suspicion."""

    @property
    def key(self) -> str:
        """What distinguishes the Job from the incident's others."""
        return self.node_name or "comparison"


def place_of(node: Mapping[str, Any], workload: Workload) -> Place:
    """A suspect's node, with all GPUs that it has."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return Place(
        node_name=node["metadata"]["name"],
        gpus=int(allocatable.get(workload.gpu_resource, 0)) if workload.gpu_resource else 0,
        instance_type=(node["metadata"].get("labels") or {}).get(_INSTANCE_TYPE, ""),
    )


def comparison(places: Iterable[Place], suspects: Iterable[str]) -> Place | None:
    """A healthy node of the same kind as the first suspect's; None where no suspect is there."""
    first = next(iter(places), None)
    return None if first is None else dataclasses.replace(first, node_name="", avoid=tuple(suspects))


def job_name(incident_id: str, key: str) -> str:
    """The Job's name: the same whenever it is asked for, so that a Job is made once."""
    return f"truestep-confirm-{incident_id.removeprefix('inc-')}-{hashlib.sha256(key.encode()).hexdigest()[:6]}"


def job_manifest(
    place: Place,
    workload: Workload,
    *,
    namespace: str,
    incident_id: str,
    alarm_id: str,
    bundle_uri: str,
    late: bool = False,
    policy: Policy,
) -> dict[str, Any]:
    """The Job. It ends by itself before `confirm_timeout_seconds`, and is never tried twice: a retry would hide a
    crash. late: the bundle was not finished at its alarm."""
    timeout = policy.confirm_timeout_seconds
    labels = {"app.kubernetes.io/part-of": "truestep", CONFIRMATION_LABEL: incident_id}
    options = {
        "--repeat": policy.confirm_runs,
        "--seconds": max(1, timeout // 3),
        "--limit": max(1, timeout * 3 // 4),
        "--wait": min(LATE_MARKER_WAIT_SECONDS if late else MARKER_WAIT_SECONDS, timeout // 4),
        "--gpus": place.gpus,
        "--report": REPORT_PATH,
    }
    command = ["python3", "-m", "truestep.bundle.on_node", bundle_uri]
    command += [word for name, value in options.items() for word in (name, str(value))]
    # Kubernetes would put the container's variables, keys among them, where the address says $(NAME).
    command = [word.replace("$", "$$") for word in command]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(incident_id, place.key),
            "namespace": namespace,
            # Not on the pod: its Job is what waits in the queue.
            "labels": {**labels, **workload.queue},
            "annotations": {ALARM_ANNOTATION: alarm_id},
        },
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": timeout,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(place, workload, command)},
        },
    }


def is_labelled(job: Mapping[str, Any], incident_id: str) -> bool:
    """Whether the Job has this incident's label: one of our name without it is not deleted."""
    return bool((job["metadata"].get("labels") or {}).get(CONFIRMATION_LABEL) == incident_id)


def progress(
    node: ConfirmedNode,
    pods: Sequence[Mapping[str, Any]],
    *,
    suspects: Iterable[str],
    alarm_id: str,
    waited_seconds: float,
) -> ConfirmedNode:
    """How far the node's pod is: ended with its report, ended without, or still waiting or running.

    pods: those of its Job (`cluster_adoption.pods_of`), at least one. Two are no result, nor is one in another place:
    the Job makes one, where it was told to.
    """
    pod = pods[0]
    if len(pods) > 1:
        names = ", ".join(sorted(one["metadata"]["name"] for one in pods)[:4])
        problem = f"{len(pods)} pods claim to be its Job's ({names}), which makes one: none of them is believed"
        return dataclasses.replace(node, ended=True, problem=problem[:300])
    if problem := misplaced(node, pod, suspects):
        return dataclasses.replace(node, ended=True, problem=problem[:300])
    status = pod.get("status") or {}
    node = dataclasses.replace(node, node_name=node.node_name or pod["spec"].get("nodeName") or "")
    statuses = {one["name"]: one for one in status.get("containerStatuses") or []}
    container = statuses.get(CONTAINER) or {}
    state = container.get("state") or {}
    if "terminated" in state:
        return _reported(node, state["terminated"], alarm_id)
    if status.get("phase") in ("Succeeded", "Failed"):
        why = status.get("message") or status.get("reason") or "no reason given"
        return dataclasses.replace(node, ended=True, problem=f"its pod was not run: {why}"[:300])
    if "running" in state:
        return dataclasses.replace(node, problem="")
    waiting = _waits_for(status, state)
    limit = PLACED_WITHIN_SECONDS if node.suspect else COMPARISON_PLACED_WITHIN_SECONDS
    overdue = waited_seconds >= limit
    words = f"not started within {limit} s: {waiting}" if overdue else waiting
    return dataclasses.replace(node, ended=overdue, problem=words[:300])


def without_pod(node: ConfirmedNode, job: Mapping[str, Any] | None, *, waited_seconds: float) -> ConfirmedNode:
    """How far a Job is that has no pod."""
    if job is None or job["metadata"].get("uid") != node.job_uid:
        return dataclasses.replace(node, ended=True, problem="somebody has deleted its Job")
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Failed" and condition["status"] == "True":
            why = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            return dataclasses.replace(node, ended=True, problem=f"its Job failed: {why}"[:300])
    overdue = waited_seconds >= PLACED_WITHIN_SECONDS
    waiting = _not_admitted(job) or "no pod has come of its Job: see the Job's events for quota or admission"
    words = f"not started within {PLACED_WITHIN_SECONDS} s: {waiting}" if overdue else waiting
    return dataclasses.replace(node, ended=overdue, problem=words)


def _not_admitted(job: Mapping[str, Any]) -> str:
    """Whom a suspended Job waits for: the recovery makes none that is."""
    if not (job.get("spec") or {}).get("suspend"):
        return ""
    if queue := queue_of(job):
        return f"Kueue has not admitted its Job to queue {queue}: its Workload says why (no quota, a held queue)"
    return (
        "its Job is suspended, as Kueue does where it manages jobs that name no queue: the training job has no label "
        f"{KUEUE_QUEUE_LABEL} to wait with"
    )


def _reported(node: ConfirmedNode, terminated: Mapping[str, Any], alarm_id: str) -> ConfirmedNode:
    message = str(terminated.get("message") or "")
    node = dataclasses.replace(node, ended=True, problem="")
    how = f"exit code {terminated.get('exitCode')}, {terminated.get('reason') or 'no reason'}"
    try:
        report = read_report(parse_json(message))
    except ContractError as error:
        said = f"it ended ({how}), and its report is malformed: {error}"[:400]
        # A field's name may hold what no store takes.
        return dataclasses.replace(node, problem=said.encode(errors="backslashreplace").decode())
    except ValueError as error:
        cut = f" (it is cut off at {REPORT_BYTES} bytes)" if len(message.encode()) >= REPORT_BYTES else ""
        shown = " ".join(message.split())[-200:]
        said = f"no report{cut}, but: {shown}" if message else "no report"
        detail = "" if shown and not message.lstrip().startswith("{") else f" ({error})"
        return dataclasses.replace(node, problem=f"it ended ({how}) with {said}{detail}"[:400])
    if report.problem:
        return dataclasses.replace(node, problem=report.problem[:400])
    if report.alarm_id != alarm_id:
        return dataclasses.replace(node, problem=f"it ran the bundle of another alarm, {report.alarm_id[:64]}")
    return dataclasses.replace(node, settled=report.settled, gpus=report.devices)


def _waits_for(status: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message') or condition.get('reason') or 'no reason given'}"
    waiting = state.get("waiting") or {}
    if waiting.get("reason") in _CANNOT_START:
        return f"its container cannot start: {waiting['reason']}: {waiting.get('message') or ''}"
    return "its container has not started yet"


def _pod_spec(place: Place, workload: Workload, command: list[str]) -> dict[str, Any]:
    own = [one for one in workload.pod.get("tolerations") or [] if place.node_name or one.get("key") not in _NEVER]
    ours = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in _QUARANTINES]
    resources = {which: dict(amounts) for which, amounts in workload.container["resources"].items()}
    if place.gpus:
        resources["limits"][workload.gpu_resource] = str(place.gpus)
    node_name = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    return {
        **workload.pod,
        "tolerations": own + (ours if place.node_name else []),
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _affinity(place)}},
        "containers": [
            {
                **workload.container,
                "name": CONTAINER,
                "command": command,
                "env": [*workload.container["env"], node_name],
                "resources": resources,
                "terminationMessagePath": REPORT_PATH,
                # A process that dies before its report leaves the end of its log there.
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
    }


_NEVER = (None, "", *_QUARANTINES)
"""Keys of tolerations that would let a comparison run on a node that somebody has closed."""


def _affinity(place: Place) -> dict[str, Any]:
    # By the node's name, as daemon sets do: the hostname label may be another. One value each is all that is accepted.
    if place.node_name:
        return {"nodeSelectorTerms": [{"matchFields": [_field("In", place.node_name)]}]}
    term: dict[str, Any] = {"matchFields": [_field("NotIn", name) for name in place.avoid]}
    if place.instance_type:
        term["matchExpressions"] = [{"key": _INSTANCE_TYPE, "operator": "In", "values": [place.instance_type]}]
    return {"nodeSelectorTerms": [term]}


def _field(operator: str, node_name: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": operator, "values": [node_name]}
