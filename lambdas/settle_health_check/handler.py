"""SettleHealthCheck: start what was deferred, wait for the end within bounds, and record it in words."""

from __future__ import annotations

import dataclasses

from lambdas.adapters.cluster_ports import cluster_of, hyperpod_of
from lambdas.adapters.decision_mac import genuine
from lambdas.adapters.health_check import begin_check, progress_of
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.cluster_health_check import settle_check
from lambdas.domain.cluster_nodes import opened_since
from lambdas.domain.decision import not_covered
from lambdas.domain.incident import iso, parse_iso
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import HealthCheckStatus

STATE = "SettleHealthCheck"


def act(work: Work) -> Answer:
    """Answers settled, whatever the check said, or pending while it runs: a pass clears nobody."""
    incident = work.incident
    cluster, hyperpod = cluster_of(work), hyperpod_of(work)
    check = incident.health_check
    if check is None or check.status is HealthCheckStatus.DEFERRED:
        # A decision that does not hold is ReplaceNode's to say: here it only starts nothing.
        holds = incident.approved and genuine(work) and not not_covered(incident, work.policy)
        check = begin_check(work, cluster, hyperpod, approved=holds)
        incident = incident.evolve(health_check=check)
    if check.status is not HealthCheckStatus.STARTED:
        return work.answer(Outcome.SETTLED, f"health check {check.status}: {check.reason}", incident=incident)
    settlement = settle_check(
        progress_of(check, cluster, hyperpod),
        running_seconds=(work.now - parse_iso(check.started_at)).total_seconds(),
        limit_seconds=work.policy.health_check_timeout_seconds,
    )
    if settlement.status is None:
        return work.pending(STATE, settlement.reason, incident=incident)
    for suspect in incident.suspects:
        # The check's own agent edits the node's taints and cordon: make sure that ours are still there. It may have
        # been a person, too, so it is kept for ReplaceNode to ask about.
        node = cluster.node(suspect.node_name) if suspect.cordon and suspect.cordon.ours else None
        reopened = opened_since(node, incident.incident_id) if node is not None else ""
        if reopened:
            incident = incident.with_suspect(dataclasses.replace(suspect, reopened=reopened))
        cluster.cordon(suspect.node_name, incident.incident_id, iso(work.now))
    done = dataclasses.replace(check, status=settlement.status, reason=settlement.reason, settled_at=iso(work.now))
    return work.answer(
        Outcome.SETTLED, f"health check {settlement.reason}", incident=incident.evolve(health_check=done)
    )


handler = workflow_handler("settle_health_check", STATE, act)
