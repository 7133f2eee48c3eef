"""AwaitReplacement: look until a new instance holds every exchanged place and its node takes pods."""

from __future__ import annotations

import dataclasses

from lambdas.adapters.cluster_ports import cluster_of, hyperpod_of
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.cluster_nodes import is_schedulable
from lambdas.domain.cluster_replacement import judge_ready
from lambdas.domain.incident import iso
from lambdas.domain.outcome import Outcome

STATE = "AwaitReplacement"


def act(work: Work) -> Answer:
    """Answers ready, pending, or escalate where it takes longer than the policy allows."""
    incident = work.incident
    if incident.dry_run:
        return work.answer(Outcome.READY, "dry run: nothing was replaced, nothing is waited for")
    cluster, hyperpod = cluster_of(work), hyperpod_of(work)
    reasons: list[str] = []
    waiting = False
    for suspect in incident.suspects:
        if suspect.replacement is None:
            reasons.append(f"{suspect.node_name}: nothing was asked for")
            continue
        holder = hyperpod.instance(logical_id=suspect.logical_id) if suspect.logical_id else None
        node = cluster.node(holder.node_name) if holder is not None and holder.node_name else None
        judgement = judge_ready(
            old_instance_id=suspect.replacement.old_instance_id,
            instance_id=holder.instance_id if holder else "",
            status=holder.status if holder else "",
            message=holder.message if holder else "",
            node=None if node is None else is_schedulable(node),
        )
        reasons.append(judgement.reason)
        waiting = waiting or not judgement.ready
        if judgement.ready and holder is not None and not suspect.replacement.ready_at:
            done = dataclasses.replace(
                suspect.replacement,
                new_instance_id=holder.instance_id,
                new_node_name=holder.node_name,
                ready_at=iso(work.now),
            )
            incident = incident.with_suspect(dataclasses.replace(suspect, replacement=done))
    reason = "; ".join(reasons)
    if not waiting:
        return work.answer(Outcome.READY, reason, incident=incident)
    if incident.waited_seconds(STATE, work.now) < work.policy.replacement_timeout_seconds:
        return work.pending(STATE, reason, incident=incident)
    advice = "see the cluster's events for capacity or lifecycle errors, then resume the incident at AwaitReplacement"
    return work.answer(Outcome.ESCALATE, f"no replacement in time: {reason}: {advice}", incident=incident)


handler = workflow_handler("await_replacement", STATE, act)
