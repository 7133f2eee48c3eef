"""From the alarm's identity rows to nodes and instances that can be acted on. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lambdas.domain.cluster_jobs import PodView
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import SuspectNode
from truestep.contract import IdentityRow, VerdictKind


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """The HyperPod instance behind a node name."""

    instance_id: str
    logical_id: str
    instance_group: str
    group_nodes: int
    """Instances of that group."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What was found under a suspect's node name; None means that it is not there."""

    node_present: bool
    instance: InstanceFacts | None
    other_pods: tuple[str, ...] = ()
    """``namespace/name`` of other jobs' pods on the node."""


class _Instance(Protocol):
    """What an instance's state tells here; `lambdas.ports.InstanceState` does."""

    @property
    def instance_id(self) -> str: ...
    @property
    def logical_id(self) -> str: ...
    @property
    def instance_group(self) -> str: ...
    @property
    def node_name(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """Who the suspects are in the cluster, and whether that is certain enough to recommend a replacement."""

    outcome: Outcome
    """``resolved``, ``ambiguous``, ``node_gone``, or ``escalate`` where the alarm names no node at all."""
    reason: str
    suspects: tuple[SuspectNode, ...]


def facts_of(
    node_name: str, node: Mapping[str, Any] | None, instances: Collection[_Instance], others: Iterable[PodView]
) -> NodeFacts:
    """Pair a node name with the HyperPod instance whose node it is. others: other jobs' pods on the node."""
    found = next((entry for entry in instances if entry.node_name == node_name), None)
    instance = None
    if found is not None:
        instance = InstanceFacts(
            instance_id=found.instance_id,
            logical_id=found.logical_id,
            instance_group=found.instance_group,
            group_nodes=sum(entry.instance_group == found.instance_group for entry in instances),
        )
    return NodeFacts(
        node_present=node is not None,
        instance=instance,
        other_pods=tuple(f"{pod.namespace}/{pod.name}" for pod in others),
    )


def recheck_pod(row: IdentityRow, pod: PodView | None, job_name: str) -> str:
    """Why the row names no place for certain; empty where the very pod, one of the job's, still runs on the very node.

    What the recovery reads of a pod, and runs again, must not be what an event makes of another workload's.
    """
    who = f"rank {row.rank} (pod {row.pod_name or 'unnamed'})"
    if not row.pod_name or not row.pod_uid:
        return f"{who} was reported without its pod's name and UID, so its node cannot be checked"
    if pod is None:
        return f"{who} is gone, so its node {row.node_name} cannot be checked any more"
    if pod.job_name != job_name:
        return f"{who} is a pod of {f'job {pod.job_name}' if pod.job_name else 'no job'}, not of job {job_name}"
    if pod.uid != row.pod_uid:
        return f"{who} has been re-created since the alarm (UID {pod.uid}, not {row.pod_uid})"
    if pod.node_name != row.node_name:
        return f"{who} is on {pod.node_name or 'no node'}, but the alarm says {row.node_name}"
    return ""


def resolve(
    suspects: Iterable[SuspectNode],
    facts: Mapping[str, NodeFacts],
    doubts: Iterable[str],
    verdict_kind: VerdictKind,
) -> Resolution:
    """Fill in instance, logical id and group of every suspect node.

    facts: node name -> what was found. doubts: the answers of `recheck_pod`. A doubt, an ambiguous verdict or
    a node without an instance makes the outcome ``ambiguous``: cordoned all the same, and a person is asked.
    """
    filled = tuple(_filled(suspect, facts[suspect.node_name]) for suspect in suspects)
    if not filled:
        return Resolution(
            outcome=Outcome.ESCALATE,
            reason="the alarm names no suspect node: look at its evidence and resume, or close the incident",
            suspects=(),
        )
    names = ", ".join(suspect.node_name for suspect in filled)
    if not any(suspect.present for suspect in filled):
        return Resolution(
            outcome=Outcome.NODE_GONE,
            reason=f"{names} left the cluster since the alarm: go on to relaunch",
            suspects=filled,
        )
    objections = [doubt for doubt in doubts if doubt]
    if verdict_kind is VerdictKind.AMBIGUOUS:
        objections.insert(0, f"the verdict itself is ambiguous between {names}")
    objections += [
        f"{suspect.node_name} is a node without a HyperPod instance: it cannot be replaced from here"
        for suspect in filled
        if suspect.present and not suspect.instance_id
    ]
    if objections:
        return Resolution(outcome=Outcome.AMBIGUOUS, reason="; ".join(objections), suspects=filled)
    places = ", ".join(f"{suspect.node_name} ({suspect.instance_id})" for suspect in filled if suspect.present)
    return Resolution(
        outcome=Outcome.RESOLVED, reason=f"every suspect still runs where the alarm says: {places}", suspects=filled
    )


def own_pods(suspects: Iterable[SuspectNode], found: Collection[str]) -> tuple[SuspectNode, ...]:
    """The suspects with those of their pods that are the job's. found: names of the job's pods that are there."""
    return tuple(
        dataclasses.replace(suspect, pod_names=tuple(name for name in suspect.pod_names if name in found))
        for suspect in suspects
    )


def claim_keys(suspects: Iterable[SuspectNode]) -> tuple[str, ...]:
    """Keys of the claims on the nodes that are there: the logical id, which survives a replacement, or the name."""
    return tuple(suspect.logical_id or suspect.node_name for suspect in suspects if suspect.present)


def claimed(suspects: Iterable[SuspectNode]) -> tuple[SuspectNode, ...]:
    """The suspects, each with the key of the claim that was granted."""
    return tuple(
        dataclasses.replace(suspect, claim_key=claim_keys((suspect,))[0]) if suspect.present else suspect
        for suspect in suspects
    )


def unclaimed(suspects: Iterable[SuspectNode]) -> tuple[SuspectNode, ...]:
    """The suspects once their claims were given back."""
    return tuple(dataclasses.replace(suspect, claim_key="") for suspect in suspects)


def smallest_group(suspects: Iterable[SuspectNode]) -> int:
    """Nodes of the smallest group that a suspect belongs to: what the breaker's percentage is taken of."""
    return min((suspect.group_nodes for suspect in suspects if suspect.present), default=0)


def _filled(suspect: SuspectNode, found: NodeFacts) -> SuspectNode:
    present = found.node_present or found.instance is not None
    if found.instance is None:
        # What an earlier run found stays: after a replacement the old instance cannot be looked up again.
        return dataclasses.replace(suspect, present=present, other_pods=found.other_pods)
    return dataclasses.replace(
        suspect,
        present=present,
        other_pods=found.other_pods,
        instance_id=found.instance.instance_id,
        logical_id=found.instance.logical_id,
        instance_group=found.instance.instance_group,
        group_nodes=found.instance.group_nodes,
    )
