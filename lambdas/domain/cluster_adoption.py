"""Whether what the cluster has of the confirmation is what the recovery made: its Jobs, and the pods of these. Pure.

Names and labels anybody in the namespace may give away. A Job that is there already is ours only where it would run
exactly what we would; a pod is a Job's only where its controller is that very object, by UID.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from lambdas.domain.cluster_jobs import queue_of
from lambdas.domain.records import ConfirmedNode

_JOB: Final = {"parallelism", "completions", "completionMode", "suspend", "selector", "podReplacementPolicy"}
_POD: Final = {"dnsPolicy", "schedulerName", "serviceAccount", "terminationGracePeriodSeconds"}
_CONTAINER: Final = {"imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy"}
"""Fields that an API server sets by itself; whatever else is there and not asked for would change what runs."""


def same_job(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a Job that is there runs what the manifest `wanted` would: no field less, no field more.

    What an API server fills in is allowed for. A webhook that rewrites Jobs makes its work look like somebody else's.
    """
    spec, asked = found.get("spec") or {}, wanted["spec"]
    pod, pod_asked = _pod_spec(spec), _pod_spec(asked)
    if queue_of(wanted):
        pod = _without_flavor(pod, pod_asked)
        spec = {**spec, "template": {**(spec.get("template") or {}), "spec": pod}}
    containers, containers_asked = pod.get("containers") or [], pod_asked["containers"]
    return (
        _holds(found["metadata"], {name: wanted["metadata"][name] for name in ("labels", "annotations")})
        and _holds(spec, asked)
        and all(spec.get(name, 1) == 1 for name in ("parallelism", "completions"))
        and _no_more(spec, asked, _JOB)
        and _no_more(pod, pod_asked, _POD)
        and all(_no_more(*pair, _CONTAINER) for pair in zip(containers, containers_asked, strict=True))
    )


def pods_of(pods: Iterable[Mapping[str, Any]], job_uid: str) -> tuple[Mapping[str, Any], ...]:
    """The pods whose controller is the Job of this UID. More than one is one too many: it tries nothing twice."""
    return tuple(pod for pod in pods if job_uid and _controller(pod) == job_uid)


def misplaced(node: ConfirmedNode, pod: Mapping[str, Any], suspects: Iterable[str]) -> str:
    """Why the pod's place shows that it is not the one that was asked for; empty where it fits, or there is none yet.

    suspects: names of the nodes under suspicion, where no comparison runs.
    """
    place = pod["spec"].get("nodeName") or ""
    if not place:
        return ""
    if node.node_name and place != node.node_name:
        return f"its pod {pod['metadata']['name']} is on {place}, not on {node.node_name}: what it says counts nothing"
    if not node.suspect and place in set(suspects):
        return f"its pod {pod['metadata']['name']} is on {place}, which is a suspect itself: it compares nothing"
    return ""


def _controller(pod: Mapping[str, Any]) -> str:
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(one.get("uid")) for one in owners if one.get("controller") and one.get("kind") == "Job"), "")


def _pod_spec(job_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (job_spec.get("template") or {}).get("spec") or {}
    return found


def _without_flavor(pod: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod's spec as it was before Kueue admitted its Job: a flavor adds node labels and tolerations, to the end."""
    tolerations = list(pod.get("tolerations") or [])[: len(asked.get("tolerations") or [])]
    return {name: value for name, value in pod.items() if name != "nodeSelector"} | {"tolerations": tolerations}


def _holds(found: Any, asked: Any) -> bool:
    """Whether `found` has all that was asked for. An API server leaves out what is empty."""
    if isinstance(asked, Mapping):
        found = found or {}
        return isinstance(found, Mapping) and all(_holds(found.get(name), value) for name, value in asked.items())
    if isinstance(asked, (list, tuple)):
        found = found or []
        return (
            isinstance(found, (list, tuple))
            and len(found) == len(asked)
            and all(_holds(one, other) for one, other in zip(found, asked, strict=True))
        )
    return bool(found == asked) or (asked == "" and found is None)


def _no_more(found: Mapping[str, Any], asked: Mapping[str, Any], defaulted: set[str]) -> bool:
    return all(
        name in asked or name in defaulted or value in (None, {}, [], "", False) for name, value in found.items()
    )
