"""ReplaceNode: ask HyperPod to exchange the approved instances, by their old ids, recorded before it is sent."""

from __future__ import annotations

from lambdas.adapters.cluster_ports import cluster_of, hyperpod_of
from lambdas.adapters.decision_mac import asked_anew, genuine
from lambdas.adapters.replacement import record_intents, reopened_nodes, request_all, unseen_neighbours
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.decision import DECIDE_AGAIN, forged, not_covered
from lambdas.domain.outcome import Outcome

STATE = "ReplaceNode"


def act(work: Work) -> Answer:
    """Answers requested, already_replaced, node_gone, or escalate where nothing may or could be asked for."""
    incident = work.incident
    if not incident.approved:
        return work.answer(Outcome.ESCALATE, "nobody has approved a replacement: nothing is replaced")
    if not genuine(work):
        return asked_anew(work, forged(incident))
    if gap := not_covered(incident, work.policy):
        return asked_anew(work, f"{gap}: nothing was replaced. {DECIDE_AGAIN}")
    lost = [suspect for suspect in incident.suspects if suspect.present and not suspect.instance_id]
    if lost:
        names = ", ".join(suspect.node_name for suspect in lost)
        return work.answer(
            Outcome.ESCALATE,
            f"{names} has no known HyperPod instance: replace it by hand, then resume the incident at AwaitReplacement",
        )
    if not any(suspect.instance_id for suspect in incident.suspects):
        return work.answer(Outcome.NODE_GONE, "every suspect node had left the cluster: nothing to replace")
    if incident.dry_run:
        return work.answer(Outcome.REQUESTED, "dry run: no replacement was asked for, it would be now")
    cluster = cluster_of(work)
    insisted = incident.escalation is not None and incident.escalation.resume_from == STATE
    reopened = "" if insisted else reopened_nodes(incident, cluster)
    if reopened:
        return work.answer(Outcome.ESCALATE, reopened)
    if work.policy.acknowledge_other_pods:
        crowded, sentence = unseen_neighbours(incident, cluster)
        if sentence:
            why = f"{sentence}: nothing was replaced. {DECIDE_AGAIN}"
            return asked_anew(work, why, incident=crowded)
    intended_before = {suspect.node_name for suspect in incident.suspects if suspect.replacement}
    recorded = record_intents(work)
    return request_all(work, recorded, hyperpod_of(work), intended_before)


handler = workflow_handler("replace_node", STATE, act)
