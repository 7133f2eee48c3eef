"""What the recovery has to be allowed in a Kubernetes cluster; infra/kubernetes grants exactly this. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lambdas.domain.cluster_jobs import JOB_KINDS

KUEUE_GROUP: Final = "kueue.x-k8s.io"


class Group(StrEnum):
    """A Kubernetes group: one capability, bound to the role of the same name. Functions get theirs by access entry."""

    NODES = "truestep-nodes"
    """Look at a node."""
    QUARANTINE = "truestep-quarantine"
    """Cordon a node, and take the cordon off."""
    NEIGHBOURS = "truestep-neighbours"
    """List which pods, of whichever namespace, run on a node."""
    REVIEW = "truestep-review"
    """Ask the API server what the other groups may do."""
    PODS = "truestep-pods"
    """Look at one pod of the job."""
    EVIDENCE = "truestep-evidence"
    """Read the tail of a pod's log."""
    JOBS = "truestep-jobs"
    """Stop a job, let it run again, and see its pods go and come."""
    CONFIRMATION = "truestep-confirmation"
    """Run the failing computation again on a node: a Job, and what its pod says at its end."""
    CONFIRMATION_END = "truestep-confirmation-end"
    """Delete that Job, so that its GPUs are free."""
    DIRECTIVES = "truestep-directives"
    """Write what the job resumes from. A ConfigMap of another namespace can be worth more than the whole job."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One permission: a verb on a resource (``pods/log`` with its subresource) of an API group."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


@dataclass(frozen=True, kw_only=True)
class Lack:
    """A permission that a group needs and has not."""

    group: Group
    verb: Verb


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. detail: what was seen, or what is missing and what to do."""

    check: str
    ok: bool
    detail: str


def _verbs(resource: str, *verbs: str, group: str = "") -> tuple[Verb, ...]:
    return tuple(Verb(group=group, resource=resource, verb=verb) for verb in verbs)


CLUSTER_WIDE: Final[Mapping[Group, tuple[Verb, ...]]] = {
    Group.NODES: _verbs("nodes", "get"),
    Group.QUARANTINE: _verbs("nodes", "patch"),
    Group.NEIGHBOURS: _verbs("pods", "list"),
    Group.REVIEW: _verbs("subjectaccessreviews", "create", group="authorization.k8s.io"),
}
"""What concerns nodes, and so belongs to no namespace."""

IN_NAMESPACES: Final[Mapping[Group, tuple[Verb, ...]]] = {
    Group.PODS: _verbs("pods", "get"),
    Group.EVIDENCE: _verbs("pods/log", "get"),
    Group.JOBS: (
        *_verbs("pods", "list"),
        *(verb for kind in JOB_KINDS.values() for verb in _verbs(kind.plural, "get", "patch", group=kind.group)),
        *_verbs("workloads", "list", "patch", group=KUEUE_GROUP),
    ),
    Group.CONFIRMATION: (*_verbs("jobs", "get", "create", group="batch"), *_verbs("pods", "list")),
    Group.CONFIRMATION_END: _verbs("jobs", "get", "delete", group="batch"),
    Group.DIRECTIVES: _verbs("configmaps", "get", "create", "patch"),
}
"""What is needed in each training namespace, and in no other."""


def apply_command(namespace: str) -> str:
    """What grants it: in a training namespace, or (empty) in the cluster as a whole."""
    if not namespace:
        return "kubectl apply -k infra/kubernetes/cluster"
    return f"kubectl apply -n {namespace} -k infra/kubernetes/namespace"


def judge_access(namespace: str, missing: Iterable[Lack]) -> Finding:
    """The finding on one namespace, or on what is cluster-wide (empty), given what is missing there."""
    check = f"Kubernetes permissions in {namespace}" if namespace else "Kubernetes permissions"
    lacks = tuple(missing)
    if not lacks:
        groups = IN_NAMESPACES if namespace else CLUSTER_WIDE
        return Finding(check=check, ok=True, detail=f"all of {len(groups)} groups")
    listed = "; ".join(f"group {lack.group} may not {lack.verb}" for lack in lacks)
    where = f"in namespace {namespace}" if namespace else "in the cluster"
    return Finding(
        check=check, ok=False, detail=f"{where}: {listed}: run {apply_command(namespace)} against this cluster"
    )
