"""What the incident's page says, worked out before the template: the template only places it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from lambdas.domain.approval import COMMENT_LIMIT, asking, other_pods, postpone_refused
from lambdas.domain.decision import shown_digest
from lambdas.domain.incident import Incident, IncidentStatus, parse_iso
from lambdas.domain.policy import Policy
from lambdas.domain.records import HealthCheckStatus, SuspectNode
from lambdas.domain.workflow import RESUMABLE_STATES, resume_refused
from lambdas.pages.charts import Chart, charts_of
from lambdas.pages.progress import ProgressStep, progress
from lambdas.pages.quarantine import quarantine_sentence
from lambdas.pages.times import duration, moment
from truestep.contract import VerdictKind
from truestep.contract.words import as_sentence, counted, plainly

FOLLOW_SECONDS = 5
"""Between two loads of a page that follows the recovery."""
_HISTORY_LIMIT = 10
_STATUS_WORDS = {
    IncidentStatus.OPEN: "the recovery is starting",
    IncidentStatus.INVESTIGATING: "the recovery collects evidence",
    IncidentStatus.AWAITING_APPROVAL: "the recovery takes the decision up",
    IncidentStatus.RECOVERING: "the recovery is at work",
    IncidentStatus.VERIFYING: "training runs again, and its first audit is awaited",
}
_NOBODY_ACCUSED = {
    VerdictKind.INPUTS: "Ranks computed with different inputs; no node is accused",
    VerdictKind.NUMERICS: "The training's numbers went wrong everywhere; no node is accused",
    VerdictKind.NONDETERMINISTIC: "Results do not repeat themselves; no node is accused",
}
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
    tone: str
    """``asking``, ``stopped``, ``ended`` or ``moving``: how the state is marked."""
    asks: bool
    """Whether a decision can be made now."""
    may_approve: bool
    may_postpone: bool
    """Whether there is a reminder to put off."""
    summary: tuple[tuple[str, str], ...]
    """What is accused, as (label, value): the first screen of a phone."""
    suspects: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """Node name, and (label, value) pairs."""
    facts: tuple[tuple[str, str], ...]
    history: tuple[str, ...]
    plan: str
    destroys: tuple[str, ...]
    other_pods: tuple[str, ...]
    must_acknowledge: bool
    shown: str
    """What an approval of this page is about: one of another page is refused."""
    progress: tuple[ProgressStep, ...]
    charts: tuple[Chart, ...]
    moving: bool
    """There is something to follow: see `moves`."""
    follow: bool
    """The page is loaded again by itself."""
    resume_states: tuple[str, ...]
    """States from which an escalated incident may go on; empty otherwise."""
    comment_limit: int = COMMENT_LIMIT
    follow_seconds: int = FOLLOW_SECONDS


def moves(incident: Incident) -> bool:
    """Whether the recovery goes on without anybody doing anything: there is something to follow."""
    return tone(incident) == "moving"


def view_of(
    incident: Incident,
    *,
    policy: Policy,
    now: datetime,
    holder: str,
    quarantined: Collection[str] = (),
    follow: bool = False,
) -> IncidentView:
    """The page's content at `now`. `follow`: a person asked for the page to load itself again."""
    asks = _asks(incident)
    pods = other_pods(incident)
    marked = tone(incident)
    return IncidentView(
        incident=incident,
        headline=headline(incident),
        state=state_sentence(incident, now),
        tone=marked,
        asks=asks,
        may_approve=policy.replacement_by_link,
        may_postpone=not postpone_refused(incident),
        summary=summary(incident, now),
        suspects=tuple((suspect.node_name, _suspect(suspect, now)) for suspect in incident.suspects),
        facts=(*_facts(incident, now), ("Cluster", quarantine_sentence(policy, quarantined, incident.suspects))),
        history=_history(incident, now),
        plan=_plan(incident, policy),
        destroys=_destroys(incident),
        other_pods=pods,
        must_acknowledge=bool(pods) and policy.acknowledge_other_pods,
        shown=shown_digest(incident),
        progress=progress(incident, now),
        charts=charts_of(incident),
        moving=marked == "moving",
        follow=follow and marked == "moving",
        resume_states=tuple(s for s in RESUMABLE_STATES if not resume_refused(incident, s, holder=holder))
        if marked == "stopped"
        else (),
    )


def _asks(incident: Incident) -> bool:
    approval = incident.approval
    return approval is not None and approval.decision is None and not incident.dry_run and asking(incident)


def tone(incident: Incident) -> str:
    """How the incident's state is marked: see `IncidentView.tone`."""
    if incident.status is IncidentStatus.CLOSED:
        return "ended"
    if incident.status is IncidentStatus.ESCALATED and incident.escalation and not incident.escalation.resume_from:
        return "stopped"
    return "asking" if _asks(incident) else "moving"


def headline(incident: Incident) -> str:
    """What is wrong where."""
    names = ", ".join(suspect.node_name for suspect in incident.suspects)
    kind = incident.alarm.verdict.kind
    if not names:
        return _NOBODY_ACCUSED.get(kind, "Silent data corruption; no node is accused")
    if kind is VerdictKind.AMBIGUOUS:
        return f"Silent data corruption; candidates: {names}"
    return f"Silent data corruption on {names}"


def state_sentence(incident: Incident, now: datetime, *, whose: str = "your") -> str:
    """Where the incident stands at `now`. whose: the decision that it may wait for, as the reader sees it."""
    approval, stop = incident.approval, incident.escalation
    if incident.status is IncidentStatus.CLOSED:
        return f"Closed at {moment(incident.closed_at, now)}."
    if incident.status is IncidentStatus.ESCALATED and stop is not None:
        if stop.resume_from:
            return f"Going on from {stop.resume_from}."
        why = ": ".join(part for part in (stop.error, stop.cause) if part)
        return f"Stopped at {stop.failed_state} and waiting for a person. {as_sentence(why)}"
    if approval is None:
        return "Investigating; no decision is asked for yet."
    if approval.decision is not None:
        word = "Approved" if approval.decision.approved else "Rejected"
        comment = f" “{approval.decision.comment}”" if approval.decision.comment else ""
        by = approval.decision.decided_by
        who = by if by.startswith("by ") else f"by {by}"
        at = moment(approval.decision.at, now)
        return f"{word} at {at} {who}.{comment} Now {_STATUS_WORDS[incident.status]}."
    if incident.dry_run:
        return f"Dry run: nothing is changed, and no decision is waited for. Now {_STATUS_WORDS[incident.status]}."
    left = parse_iso(approval.expires_at) - now
    until = moment(approval.expires_at, now)
    if left.total_seconds() <= 0:
        return f"The question expired at {until}; it can still be answered once the recovery has noticed."
    again = f" You are asked again after {moment(approval.ask_again_at, now)}." if approval.ask_again_at else ""
    return f"Waiting for {whose} decision; {duration(left)} left, until {until}.{again}"


def summary(incident: Incident, now: datetime) -> tuple[tuple[str, str], ...]:
    """What is accused, as (label, value)."""
    alarm = incident.alarm
    gpus = ", ".join(gpu for suspect in incident.suspects for gpu in suspect.gpu_uuids)
    nodes = ", ".join(suspect.node_name for suspect in incident.suspects)
    return (
        *((("GPU", gpus or "unknown"), ("Node", nodes)) if nodes else (("Accused", "no GPU and no node"),)),
        ("Job", _job(incident)),
        ("Alarm", f"step {alarm.step}, {moment(alarm.detected_at, now)}"),
    )


def _job(incident: Incident) -> str:
    return f"{incident.job.namespace}/{incident.job.name}, {counted(incident.alarm.run.world_size, 'rank')}"


def _suspect(suspect: SuspectNode, now: datetime) -> tuple[tuple[str, str], ...]:
    rows = [
        ("GPU", ", ".join(suspect.gpu_uuids) or "unknown"),
        ("Rank", ", ".join(str(rank) for rank in suspect.ranks)),
        ("Instance", suspect.instance_id or "not resolved"),
        ("Instance group", suspect.instance_group or "not resolved"),
        ("Quarantine", _quarantine(suspect, now)),
    ]
    exchange = suspect.replacement
    if exchange is not None:
        requested = moment(exchange.requested_at, now) if exchange.requested_at else "now"
        rows.append(("Replaced by", exchange.new_node_name or f"requested {requested}"))
    if suspect.released_at:
        rows.append(("Released", moment(suspect.released_at, now)))
    return tuple(rows)


def _quarantine(suspect: SuspectNode, now: datetime) -> str:
    if not suspect.present:
        return "the node had left the cluster"
    if suspect.cordon is None:
        return "not quarantined"
    if not suspect.cordon.ours:
        return "cordoned by someone else before; left theirs"
    return f"since {moment(suspect.cordon.at, now)}"


def _facts(incident: Incident, now: datetime) -> tuple[tuple[str, str], ...]:
    alarm, check = incident.alarm, incident.health_check
    confirmation = incident.confirmation
    clean = "never" if alarm.clean_through is None else f"step {alarm.clean_through}"
    return (
        ("Job", f"{_job(incident)}, run {alarm.run.run_id}"),
        ("Alarm", f"{plainly(alarm.check)} at step {alarm.step}, {moment(alarm.detected_at, now)}"),
        ("Clean through", f"{clean}: the newest step at which every check passed on every rank"),
        (
            "Verdict",
            f"{alarm.verdict.kind}; cause {incident.recommendation.cause if incident.recommendation else 'open'}",
        ),
        ("Health check", f"{_HEALTH_WORDS[check.status]}. {as_sentence(check.reason)}" if check else "not started"),
        ("Confirmation", as_sentence(confirmation.reason) if confirmation else "not run yet"),
    )


def _history(incident: Incident, now: datetime) -> tuple[str, ...]:
    lines = []
    for past in incident.history[:_HISTORY_LIMIT]:
        notes = [f"{past.verdict_kind} verdict"]
        notes += ["rejected by a person"] if past.rejected else []
        notes += ["its relaunch led here"] if past.linked else []
        lines.append(
            f"{past.gpu_uuid} on {past.node_name}: {', '.join(notes)}, {moment(past.at, now)}, {past.incident_id}"
        )
    left = len(incident.history) - len(lines)
    return (*lines, *([f"and {left} more"] if left else []))


def _plan(incident: Incident, policy: Policy) -> str:
    alarm, chosen = incident.alarm, incident.checkpoint
    if chosen is not None:
        return (
            f"Resume from step {chosen.checkpoint.step} ({chosen.checkpoint.uri}): compute "
            f"{counted(chosen.lost_steps, 'step')} again. {as_sentence(chosen.reason)} Holds for a fault that hits "
            f"with probability p = {chosen.hit_probability:.3g} a step, with risk {chosen.risk:g}."
        )
    if alarm.checkpoint is None or alarm.clean_through is None:
        return "No trusted checkpoint was known to the run. The recovery will look for one, and stop if there is none."
    measured = incident.confirmation.hit_probability if incident.confirmation else None
    margin = policy.margin_steps(measured)
    p = policy.hit_probability(measured)
    bound = alarm.clean_through - margin
    terms = f"(fault probability p = {p:.3g} a step, risk {policy.risk:g}: a margin of {counted(margin, 'step')})"
    if alarm.checkpoint.step <= bound:
        again = counted(alarm.step - alarm.checkpoint.step, "step")
        return f"Planned: resume from trusted step {alarm.checkpoint.step}; compute {again} again {terms}."
    if bound < 0:
        return f"Planned: none. No checkpoint is old enough {terms}; the recovery would stop there and ask."
    at_least = alarm.step - bound
    lost_steps = f"at least {counted(at_least, 'step')} lost"
    return f"Planned: the newest trusted checkpoint at or before step {bound}; {lost_steps} {terms}."


def _destroys(incident: Incident) -> tuple[str, ...]:
    return tuple(
        f"{suspect.node_name} ({suspect.instance_id or 'instance not resolved'}): the instance, its root and secondary "
        "volumes and its local NVMe storage"
        for suspect in incident.suspects
        if suspect.present
    )
