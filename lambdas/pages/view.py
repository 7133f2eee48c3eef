"""What the incident's page says, worked out before the template: the template only places it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from lambdas.domain.approval import COMMENT_LIMIT, asking, other_pods
from lambdas.domain.incident import Incident, IncidentStatus, parse_iso
from lambdas.domain.policy import Policy
from lambdas.domain.records import HealthCheckStatus, SuspectNode
from lambdas.domain.workflow import RESUMABLE_STATES, resume_refused
from truestep.contract import VerdictKind

_HEALTH_WORDS = {
    HealthCheckStatus.STARTED: "running",
    HealthCheckStatus.SKIPPED: "not run",
    HealthCheckStatus.DEFERRED: "waits for the decision",
    HealthCheckStatus.PASSED: "passed, which clears nobody",
    HealthCheckStatus.FAILED: "failed",
    HealthCheckStatus.UNKNOWN: "ended without a result",
}


@dataclass(frozen=True, kw_only=True)
class IncidentView:
    """The page's content. Strings are not escaped yet; the template does that."""

    incident: Incident
    headline: str
    state: str
    asks: bool
    """Whether a decision can be made now."""
    may_approve: bool
    suspects: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """Node name, and (label, value) pairs."""
    facts: tuple[tuple[str, str], ...]
    plan: str
    destroys: tuple[str, ...]
    other_pods: tuple[str, ...]
    must_acknowledge: bool
    resume_states: tuple[str, ...]
    """States from which an escalated incident may go on; empty otherwise."""
    comment_limit: int = COMMENT_LIMIT


def view_of(incident: Incident, *, policy: Policy, now: datetime) -> IncidentView:
    """The page's content at `now`."""
    approval = incident.approval
    asks = approval is not None and approval.decision is None and not incident.dry_run and asking(incident)
    pods = other_pods(incident)
    waits = incident.status is IncidentStatus.ESCALATED and bool(
        incident.escalation and not incident.escalation.resume_from
    )
    return IncidentView(
        incident=incident,
        headline=_headline(incident),
        state=_state(incident, now),
        asks=asks,
        may_approve=policy.replacement_by_link,
        suspects=tuple((suspect.node_name, _suspect(suspect)) for suspect in incident.suspects),
        facts=_facts(incident),
        plan=_plan(incident, policy),
        destroys=_destroys(incident),
        other_pods=pods,
        must_acknowledge=bool(pods) and policy.acknowledge_other_pods,
        resume_states=tuple(s for s in RESUMABLE_STATES if not resume_refused(incident, s)) if waits else (),
    )


def _headline(incident: Incident) -> str:
    names = ", ".join(suspect.node_name for suspect in incident.suspects) or "no node"
    if incident.alarm.verdict.kind is VerdictKind.AMBIGUOUS:
        return f"Silent data corruption; candidates: {names}"
    return f"Silent data corruption on {names}"


def _state(incident: Incident, now: datetime) -> str:
    approval, stop = incident.approval, incident.escalation
    if incident.status is IncidentStatus.CLOSED:
        return f"Closed at {incident.closed_at}."
    if incident.status is IncidentStatus.ESCALATED and stop is not None:
        if stop.resume_from:
            return f"Going on from {stop.resume_from}."
        why = ": ".join(part for part in (stop.error, stop.cause) if part)
        return f"Stopped at {stop.failed_state} and waiting for a person. {why}"
    if approval is None:
        return "Investigating; no decision is asked for yet."
    if approval.decision is not None:
        word = "Approved" if approval.decision.approved else "Rejected"
        return f"{word} at {approval.decision.at}, {approval.decision.decided_by}. Now: {incident.status}."
    hours = (parse_iso(approval.expires_at) - now).total_seconds() / 3600
    left = f"{hours:.0f} hours" if hours >= 1 else "less than an hour" if hours > 0 else "no time"
    return f"Waiting for your decision; {left} left (until {approval.expires_at})."


def _suspect(suspect: SuspectNode) -> tuple[tuple[str, str], ...]:
    rows = [
        ("GPU", ", ".join(suspect.gpu_uuids) or "unknown"),
        ("Rank", ", ".join(str(rank) for rank in suspect.ranks)),
        ("Instance", suspect.instance_id or "not resolved"),
        ("Instance group", suspect.instance_group or "not resolved"),
        ("Quarantine", _quarantine(suspect)),
    ]
    exchange = suspect.replacement
    if exchange is not None:
        rows.append(("Replaced by", exchange.new_node_name or f"requested {exchange.requested_at or 'now'}"))
    if suspect.released_at:
        rows.append(("Released", suspect.released_at))
    return tuple(rows)


def _quarantine(suspect: SuspectNode) -> str:
    if not suspect.present:
        return "the node had left the cluster"
    if suspect.cordon is None:
        return "not quarantined"
    return f"since {suspect.cordon.at}" if suspect.cordon.ours else "cordoned by someone else before; left theirs"


def _facts(incident: Incident) -> tuple[tuple[str, str], ...]:
    alarm, check = incident.alarm, incident.health_check
    history = ", ".join(f"{past.incident_id} ({past.verdict_kind}, {past.at})" for past in incident.history[:5])
    confirmation = incident.confirmation
    clean = "never" if alarm.clean_through is None else f"step {alarm.clean_through}"
    return (
        ("Job", f"{incident.job.namespace}/{incident.job.name}, {alarm.run.world_size} ranks, run {alarm.run.run_id}"),
        ("Alarm", f"{alarm.check} at step {alarm.step}, {alarm.detected_at}; every check clean through: {clean}"),
        (
            "Verdict",
            f"{alarm.verdict.kind}; cause {incident.recommendation.cause if incident.recommendation else 'open'}",
        ),
        ("Earlier incidents", history or "none known of these GPUs"),
        ("Health check", f"{_HEALTH_WORDS[check.status]}. {check.reason}" if check else "not started"),
        ("Confirmation", confirmation.reason if confirmation else "not run yet"),
    )


def _plan(incident: Incident, policy: Policy) -> str:
    alarm, chosen = incident.alarm, incident.checkpoint
    if chosen is not None:
        return (
            f"Resume from step {chosen.checkpoint.step} ({chosen.checkpoint.uri}): {chosen.lost_steps} steps are "
            f"computed again. {chosen.reason} Holds for a fault that hits with probability p = "
            f"{chosen.hit_probability:g} a step, with risk {chosen.risk:g}."
        )
    if alarm.checkpoint is None or alarm.clean_through is None:
        return "No trusted checkpoint was known to the run. The recovery will look for one, and stop if there is none."
    measured = incident.confirmation.hit_probability if incident.confirmation else None
    margin = policy.margin_steps(measured)
    p = policy.assumed_hit_probability if measured is None else measured
    bound = alarm.clean_through - margin
    terms = f"(fault probability p = {p:g} a step, risk {policy.risk:g}: a margin of {margin} steps)"
    if alarm.checkpoint.step <= bound:
        lost = alarm.step - alarm.checkpoint.step
        return f"Planned: resume from trusted step {alarm.checkpoint.step}; {lost} steps are computed again {terms}."
    at_least = alarm.step - max(bound, 0)
    return f"Planned: the newest trusted checkpoint at or before step {bound}; at least {at_least} steps lost {terms}."


def _destroys(incident: Incident) -> tuple[str, ...]:
    return tuple(
        f"{suspect.node_name} ({suspect.instance_id or 'instance not resolved'}): the instance, its root and secondary "
        "volumes and its local NVMe storage"
        for suspect in incident.suspects
        if suspect.present
    )
