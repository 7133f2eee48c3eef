"""Exchanges an incident's instances, safely across crashes: the intent is stored before the request is sent.

store intent (old id)  ->  BatchReplaceClusterNodes(NodeIds=[old id])  ->  store "requested"
                       ^ a crash anywhere after here finds the intent, and reads "not found" as success
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from lambdas.adapters.runtime import Answer, Work
from lambdas.domain.cluster_jobs import others_on_node
from lambdas.domain.cluster_nodes import opened_since
from lambdas.domain.cluster_replacement import ReplaceJudgement, ReplaceStanding, judge_replace
from lambdas.domain.incident import Incident, iso
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import Replacement, SuspectNode
from lambdas.ports import Cluster, HyperPod


def unseen_neighbours(incident: Incident, cluster: Cluster) -> tuple[Incident, str]:
    """Other jobs' pods that came onto a node after the approver was shown its list; with the list brought up to date.

    The sentence is empty where there are none.
    """
    job = incident.job
    news = []
    for suspect in incident.suspects:
        if not suspect.present or suspect.replacement:
            continue
        pods = others_on_node(cluster.pods_on(suspect.node_name), job.namespace, job.name)
        now = tuple(f"{pod.namespace}/{pod.name}" for pod in pods)
        unseen = [name for name in now if name not in suspect.other_pods]
        if unseen:
            news.append(f"{suspect.node_name}: {', '.join(unseen)}")
            incident = incident.with_suspect(dataclasses.replace(suspect, other_pods=now))
    if not news:
        return incident, ""
    return incident, f"pods of other jobs came that the approval did not cover, to {'; '.join(news)}"


def reopened_nodes(incident: Incident, cluster: Cluster) -> str:
    """The sentence about nodes that somebody has opened since this incident closed them; empty where none was.

    Whoever opens a node says that it is to be used: replacing it needs a person who knows of that.
    """
    opened = []
    for suspect in incident.suspects:
        if suspect.cordon is None or not suspect.cordon.ours or suspect.replacement or not suspect.present:
            continue
        node = cluster.node(suspect.node_name)
        sentence = suspect.reopened or (opened_since(node, incident.incident_id) if node is not None else "")
        opened += [sentence] if sentence else []
    if not opened:
        return ""
    return (
        f"{'; '.join(opened)}: nothing is replaced. Find out who opened it and why; then resume the incident at "
        "CordonNode to quarantine it again, or at ReplaceNode to replace it all the same"
    )


def record_intents(work: Work) -> Incident:
    """Store which instances are about to be exchanged; returns the incident as stored. Stored intents are kept."""
    incident = work.incident
    for suspect in incident.suspects:
        if suspect.instance_id and suspect.replacement is None:
            intent = Replacement(old_instance_id=suspect.instance_id, intended_at=iso(work.now))
            incident = incident.with_suspect(dataclasses.replace(suspect, replacement=intent))
    return incident if incident is work.incident else work.store.save(incident)


def request_all(work: Work, incident: Incident, hyperpod: HyperPod, intended_before: Collection[str]) -> Answer:
    """Send the requests that have not been accepted yet.

    Requested where HyperPod accepted one now, already_replaced where every one is on its way, else escalate.
    """
    reasons: list[str] = []
    standings: set[ReplaceStanding] = set()
    for suspect in incident.suspects:
        if suspect.replacement is None:
            continue
        judgement = _request(suspect, suspect.replacement, hyperpod, suspect.node_name in intended_before)
        standings.add(judgement.standing)
        reasons.append(judgement.reason)
        if judgement.standing is not ReplaceStanding.REFUSED and not suspect.replacement.requested_at:
            sent = dataclasses.replace(suspect.replacement, requested_at=iso(work.now))
            incident = incident.with_suspect(dataclasses.replace(suspect, replacement=sent))
    if ReplaceStanding.REFUSED in standings:
        outcome = Outcome.ESCALATE
    else:
        outcome = Outcome.REQUESTED if ReplaceStanding.REQUESTED in standings else Outcome.ALREADY_REPLACED
    return work.answer(outcome, "; ".join(reasons), incident=incident)


def _request(
    suspect: SuspectNode, replacement: Replacement, hyperpod: HyperPod, intended_before: bool
) -> ReplaceJudgement:
    old = replacement.old_instance_id
    if replacement.requested_at:
        return ReplaceJudgement(
            standing=ReplaceStanding.ALREADY_REPLACED, reason=f"the replacement of {old} was asked for before"
        )
    holder = hyperpod.instance(logical_id=suspect.logical_id) if suspect.logical_id else None
    if holder is not None and holder.instance_id and holder.instance_id != old:
        return ReplaceJudgement(
            standing=ReplaceStanding.ALREADY_REPLACED,
            reason=f"{holder.instance_id} has taken the place of {old} already",
        )
    answer = hyperpod.replace(old)
    current = None if answer.accepted else hyperpod.instance(instance_id=old)
    return judge_replace(
        answer, old, intended_before=intended_before, status_now=current.status if current is not None else ""
    )
