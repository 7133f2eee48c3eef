"""What the recovery has to be allowed in a Kubernetes cluster; infra/kubernetes grants exactly this. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lambdas.domain.cluster_jobs import JOB_KINDS


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One permission: a verb on a resource (``pods/log`` with its subresource) of an API group."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. detail: what was seen, or what is missing and what to do."""

    check: str
    ok: bool
    detail: str


_CORE: Final = {
    "nodes": ("get", "patch"),
    "pods": ("get", "list"),
    "pods/log": ("get",),
    "configmaps": ("get", "create", "patch"),
}

KUEUE_GROUP: Final = "kueue.x-k8s.io"

NEEDED_VERBS: Final[tuple[Verb, ...]] = (
    *(Verb(group="", resource=resource, verb=verb) for resource, verbs in _CORE.items() for verb in verbs),
    *(
        Verb(group=kind.group, resource=kind.plural, verb=verb)
        for kind in JOB_KINDS.values()
        for verb in ("get", "patch")
    ),
    *(Verb(group=KUEUE_GROUP, resource="workloads", verb=verb) for verb in ("list", "patch")),
)


def judge_verbs(missing: tuple[Verb, ...]) -> Finding:
    """The finding on Kubernetes permissions, given those that are missing."""
    if not missing:
        return Finding(check="Kubernetes permissions", ok=True, detail=f"all {len(NEEDED_VERBS)} verbs are allowed")
    listed = ", ".join(str(verb) for verb in missing)
    return Finding(
        check="Kubernetes permissions",
        ok=False,
        detail=f"not allowed: {listed}; run kubectl apply -k infra/kubernetes against this cluster",
    )
