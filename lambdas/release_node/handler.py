"""ReleaseNode: after a rejection, undo what this incident did to the nodes, and only that."""

from __future__ import annotations

import dataclasses

from lambdas.adapters.cluster_ports import cluster_of
from lambdas.adapters.decision_mac import asked_anew, genuine
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.cluster_resolution import unclaimed
from lambdas.domain.decision import forged
from lambdas.domain.incident import iso
from lambdas.domain.outcome import Outcome

STATE = "ReleaseNode"


def act(work: Work) -> Answer:
    """Answers released, left_alone where nothing on the nodes was this incident's any more, or escalate."""
    cluster = cluster_of(work)
    incident = work.incident
    if not incident.dry_run:
        if not incident.rejected:
            reason = "nobody has rejected the accusation: the nodes stay quarantined. Resume at RequestApproval"
            return work.answer(Outcome.ESCALATE, reason)
        if not genuine(work):
            return asked_anew(work, forged(incident))
    reasons: list[str] = []
    for suspect in incident.suspects:
        plan = cluster.release(suspect.node_name, incident.incident_id)
        if plan is None:
            reasons.append(f"{suspect.node_name} has left the cluster")
        elif plan.released or not suspect.released_at:
            reasons.append(plan.reason)
        if plan is not None and plan.released and not incident.dry_run:
            incident = incident.with_suspect(dataclasses.replace(suspect, released_at=iso(work.now)))
    keys = [suspect.claim_key for suspect in incident.suspects if suspect.claim_key]
    if keys and not incident.dry_run:
        work.store.release_nodes(incident.incident_id, incident.job.cluster_arn, keys)
        incident = incident.evolve(suspects=unclaimed(incident.suspects))
    released = [suspect.node_name for suspect in incident.suspects if suspect.released_at]
    reason = "; ".join(reasons) or f"{', '.join(released)} had been released before"
    return work.answer(Outcome.RELEASED if released else Outcome.LEFT_ALONE, reason, incident=incident)


handler = workflow_handler("release_node", STATE, act)
