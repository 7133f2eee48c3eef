"""CordonNode: nothing new lands on the suspects. What others put on the nodes stays as it is."""

from __future__ import annotations

import dataclasses

from lambdas.adapters.cluster_ports import cluster_of
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.incident import iso
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import Cordon

STATE = "CordonNode"


def act(work: Work) -> Answer:
    """Answers cordoned; left_theirs where every node was cordoned by others; node_gone where none is left."""
    cluster = cluster_of(work)
    incident = work.incident
    reasons: list[str] = []
    outcomes: set[Outcome] = set()
    for suspect in incident.suspects:
        plan = cluster.cordon(suspect.node_name, incident.incident_id, iso(work.now))
        if plan is None:
            reasons.append(f"{suspect.node_name} has left the cluster")
            continue
        outcomes.add(Outcome.LEFT_THEIRS if plan.theirs else Outcome.CORDONED)
        reasons.append(plan.reason)
        at = suspect.cordon.at if suspect.cordon else iso(work.now)
        cordon = Cordon(at=at, ours=not plan.theirs, previous_unschedulable=plan.theirs)
        if not incident.dry_run:
            incident = incident.with_suspect(dataclasses.replace(suspect, cordon=cordon, reopened=""))
    if Outcome.CORDONED in outcomes:
        outcome = Outcome.CORDONED
    else:
        outcome = Outcome.LEFT_THEIRS if outcomes else Outcome.NODE_GONE
    return work.answer(outcome, "; ".join(reasons), incident=incident)


handler = workflow_handler("cordon_node", STATE, act)
