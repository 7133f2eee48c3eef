"""What people are told: subjects and texts of notifications. Plain text; everything in it may come from an event."""

from __future__ import annotations

from dataclasses import dataclass

from lambdas.domain.incident import Incident
from lambdas.domain.report import costs, summary
from truestep.contract import Alarm


@dataclass(frozen=True, kw_only=True)
class Message:
    """A notification."""

    subject: str
    text: str


def approval_wanted(incident: Incident, url: str) -> Message:
    """Asks for a decision. `url` carries the signature: whoever has it can decide."""
    approval = incident.approval
    reminder = approval is not None and approval.requests > 1
    lines = [
        incident.alarm.verdict.reason,
        "",
        *_facts(incident),
        f"Advice: {_advice(incident)}",
        "",
        "Decide here (the link works for whoever has it; opening it changes nothing):",
        url,
    ]
    if approval is not None:
        lines += ["", f"Without an answer by {approval.expires_at} the incident escalates; nodes stay quarantined."]
    if incident.dry_run:
        lines += ["", "DRY RUN: nothing is replaced whatever is answered."]
    prefix = "Reminder: " if reminder else ""
    return Message(subject=f"{prefix}Approve a node's replacement? {_where(incident)}", text="\n".join(lines))


def escalation(incident: Incident, url: str) -> Message:
    """Says where the recovery stopped, what is safe, and how it goes on."""
    stop = incident.escalation
    assert stop is not None, "an escalation message of an incident that is not escalated"
    lines = [
        f"The recovery stopped at {stop.failed_state} and waits for a person.",
        f"Why: {stop.error}{': ' if stop.error and stop.cause else ''}{stop.cause}",
        "",
        *_facts(incident),
        "What was quarantined stays quarantined; nothing is retried until somebody says where to go on.",
        "",
        "Cure the reason, then choose the state to go on from, here:",
        url,
    ]
    return Message(subject=f"Recovery needs help at {stop.failed_state}: {_where(incident)}", text="\n".join(lines))


def closed(incident: Incident, report_uri: str) -> Message:
    """Says how the incident ended."""
    figures = costs(incident)
    lines = [summary(incident), ""]
    if figures["idle_gpu_hours"] is not None:
        lines.append(f"Idle between alarm and resume: {figures['idle_gpu_hours']} GPU-hours.")
    lines.append(f"Report: {report_uri}")
    return Message(subject=f"Incident closed: {_where(incident)}", text="\n".join(lines))


def accuses_nobody(alarm: Alarm) -> Message:
    """Tells the owners of the training code about a verdict that opens no incident."""
    run = alarm.run
    text = (
        f"{alarm.verdict.reason}\n\nVerdict: {alarm.verdict.kind} (check {alarm.check}, step {alarm.step}).\n"
        f"Job {run.namespace}/{run.job_name}, run {run.run_id}.\n"
        "No hardware is accused and nothing was changed. Training holds until it is stopped or its hold time passes."
    )
    return Message(subject=f"Training stopped, no hardware accused: {run.namespace}/{run.job_name}", text=text)


def _where(incident: Incident) -> str:
    drill = "DRILL " if incident.alarm.drill else ""
    return f"{drill}{incident.job.namespace}/{incident.job.name} ({incident.incident_id})"


def _facts(incident: Incident) -> list[str]:
    lines = [f"Job: {incident.job.namespace}/{incident.job.name}, step {incident.alarm.step}"]
    for suspect in incident.suspects:
        gpus = ", ".join(suspect.gpu_uuids) or "GPU unknown"
        ranks = ", ".join(str(rank) for rank in suspect.ranks)
        lines.append(f"Suspect: {suspect.node_name} ({gpus}; rank {ranks})")
    return lines


def _advice(incident: Incident) -> str:
    return incident.recommendation.reason if incident.recommendation else "none yet"
