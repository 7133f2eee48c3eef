"""What people are told: subjects and texts of notifications. Plain text; everything in it may come from an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lambdas.domain.incident import Incident
from lambdas.domain.report import costs, summary
from truestep.contract import Alarm, VerdictKind
from truestep.contract.words import counted

_REMEDY: Final = {
    VerdictKind.NUMERICS: "every rank computes the same NaN or Inf. Look at the loss, the learning rate and the data "
    "of this step; if it does not come back from an older checkpoint, a fault between audits may have caused it.",
    VerdictKind.INPUTS: "ranks that should have had the same inputs had others. Look at the data loader, "
    "rebuild_batch(step, rank) and the seeds.",
    VerdictKind.NONDETERMINISTIC: "the same step does not give the same result twice on healthy GPUs. Turn "
    "deterministic kernels on, and look for state that the model keeps outside its buffers.",
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """A notification."""

    subject: str
    text: str


def approval_wanted(incident: Incident, url: str) -> Message:
    """Asks for a decision. `url` carries the signature: whoever has it can decide."""
    approval = incident.approval
    reminder = approval is not None and bool(approval.announced_at)
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
    return Message(subject=_subject(f"{prefix}Approve a node's replacement?", incident), text="\n".join(lines))


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
    return Message(subject=_subject(f"Recovery needs help at {stop.failed_state}:", incident), text="\n".join(lines))


def closed(incident: Incident, report_uri: str) -> Message:
    """Says how the incident ended, and what it cost. Nobody has to do anything."""
    lines = [summary(incident), "", *_time_lost(incident), f"Report: {report_uri}", "Nothing is left to do."]
    return Message(subject=_subject("Incident closed:", incident), text="\n".join(lines))


def accuses_nobody(alarm: Alarm) -> Message:
    """Tells the owners of the training code about a verdict that opens no incident."""
    run = alarm.run
    text = (
        f"{alarm.verdict.reason}\n\nVerdict: {alarm.verdict.kind} (check {alarm.check}, step {alarm.step}).\n"
        f"Job {run.namespace}/{run.job_name}, run {run.run_id}.\n"
        "No hardware is accused and nothing was changed: no recovery starts, and no resume directive will come.\n"
        f"What to do: {_REMEDY[alarm.verdict.kind]} Then start the job again. Should it refuse to start over a "
        f"tombstone, remove {run.checkpoint_root.rstrip('/') or '<checkpoint root>'}/tombstone.json first, once you "
        "know that the newest trusted checkpoint is clean."
    )
    return Message(subject=f"Training stopped, no hardware accused: {run.namespace}/{run.job_name}", text=text)


def arrived_late(alarm: Alarm, why: str) -> Message:
    """Tells people about an accusation that the job has trained on after: nothing is done on its word alone."""
    run = alarm.run
    lines = [
        *_accusation(alarm),
        f"This alarm {why}.",
        "Nothing was stopped, quarantined or revoked. Make sure that the accused node was replaced or checked, and "
        "that the present attempt started from a checkpoint at or before the last clean step "
        f"({alarm.clean_through if alarm.clean_through is not None else 'none is known'}).",
    ]
    return Message(subject=f"Late alarm, nothing was changed: {run.namespace}/{run.job_name}", text="\n".join(lines))


def joined_unheard(incident: Incident, alarm: Alarm) -> Message:
    """Tells people about an alarm of a run that the open incident is not about: on its word nothing is stopped."""
    lines = [
        *_accusation(alarm),
        f"It joined incident {incident.incident_id}, which is {incident.status} and is about attempt "
        f"{incident.alarm.run.attempt_id}. Nothing more was stopped, quarantined or revoked, and the run that raised "
        "it holds until somebody stops it.",
        "Was that incident settled by hand? Close it, go on from CloseIncident there: while it is open, alarms of this "
        "job start no recovery. Otherwise go on from StopTraining there: that stops this run as well.",
    ]
    return Message(
        subject=_subject("An alarm of another run joined an open incident:", incident), text="\n".join(lines)
    )


def _accusation(alarm: Alarm) -> list[str]:
    run = alarm.run
    return [
        alarm.verdict.reason,
        "",
        f"Job {run.namespace}/{run.job_name}, run {run.run_id}, attempt {run.attempt_id}: check {alarm.check}, step "
        f"{alarm.step}, raised at {alarm.detected_at}.",
        *(f"Accused: {row.node_name} ({row.gpu_uuid or 'GPU unknown'}; rank {row.rank})" for row in alarm.suspects),
    ]


def _time_lost(incident: Incident) -> list[str]:
    figures = costs(incident)
    idle, gpu_hours, steps = figures["idle_seconds"], figures["idle_gpu_hours"], figures["lost_steps"]
    if idle is None:
        return []
    again = f", and {counted(int(steps), 'step')} computed again" if steps else ""
    minutes = counted(round(idle / 60), "minute")
    return [f"Time lost: {minutes} between alarm and resume ({gpu_hours} GPU-hours idle){again}."]


def _subject(what: str, incident: Incident) -> str:
    # A drill says so first: a phone shows the beginning alone.
    drill = "DRILL: " if incident.alarm.drill else ""
    return f"{drill}{what} {incident.job.namespace}/{incident.job.name} ({incident.incident_id})"


def _facts(incident: Incident) -> list[str]:
    lines = [f"Job: {incident.job.namespace}/{incident.job.name}, step {incident.alarm.step}"]
    for suspect in incident.suspects:
        gpus = ", ".join(suspect.gpu_uuids) or "GPU unknown"
        ranks = ", ".join(str(rank) for rank in suspect.ranks)
        lines.append(f"Suspect: {suspect.node_name} ({gpus}; rank {ranks})")
    return lines


def _advice(incident: Incident) -> str:
    return incident.recommendation.reason if incident.recommendation else "none yet"
