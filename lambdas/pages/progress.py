"""How far a recovery has come, as a short list of steps that a person can follow to the end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.pages.times import moment


class Stage(StrEnum):
    """Where a step stands. The words are shown."""

    DONE = "done"
    NOW = "now"
    STOPPED = "stopped here"
    NEXT = "to come"


@dataclass(frozen=True, kw_only=True)
class ProgressStep:
    """One line of the list."""

    title: str
    stage: Stage
    detail: str = ""
    """When it was done, or why it stopped."""


_BEFORE = (
    ("Node quarantined", "CordonNode"),
    ("Evidence kept", "SnapshotEvidence"),
    ("Training stopped", "StopTraining"),
    ("Computation run again", "ConfirmSuspect"),
    ("Health check begun", "StartHealthCheck"),
    ("Decision", "RequestApproval"),
)
_AFTER_APPROVAL = (("Replacement requested", "ReplaceNode"), ("New node ready", "AwaitReplacement"))
_AFTER_REJECTION = (("Node given back", "ReleaseNode"),)
_RESUME = (
    ("Trusted checkpoint chosen", "ChooseCheckpoint"),
    ("Training started again", "Relaunch"),
    ("First audit passed", "VerifyRecovery"),
    ("Incident closed", "CloseIncident"),
)
_UNFINISHED = frozenset({"pending", "waiting", "escalate"})


def progress(incident: Incident, now: datetime) -> tuple[ProgressStep, ...]:
    """The steps of this incident's recovery. Without a decision the approval's are shown, as what would follow."""
    steps = (*_BEFORE, *(_AFTER_REJECTION if incident.rejected or incident.dry_run else _AFTER_APPROVAL), *_RESUME)
    done = {state: at for _, state in steps if (at := _done_at(incident, state))}
    stopped = _stopped_at(incident)
    now_at = "" if stopped else next((state for _, state in steps if state not in done), "")
    listed = []
    for title, state in steps:
        if state == stopped:
            listed.append(ProgressStep(title=title, stage=Stage.STOPPED))
        elif state in done:
            listed.append(ProgressStep(title=title, stage=Stage.DONE, detail=moment(done[state], now, day=False)))
        elif incident.status is IncidentStatus.CLOSED:
            continue  # it was not needed: a node that had left is not quarantined
        elif state == now_at:
            listed.append(ProgressStep(title=title, stage=Stage.NOW))
        else:
            listed.append(ProgressStep(title=title, stage=Stage.NEXT))
    return tuple(listed)


def _done_at(incident: Incident, state: str) -> str:
    """When the state was done; empty where it was not. Waiting states are done when what they wait for is recorded."""
    if state == "RequestApproval":
        decision = incident.approval.decision if incident.approval else None
        if decision is not None or not incident.dry_run:
            return decision.at if decision else ""
    if state == "VerifyRecovery":
        return incident.verification.verified_at
    answers = [entry for entry in incident.timeline if entry.state == state]
    return answers[-1].at if answers and answers[-1].outcome not in _UNFINISHED else ""


def _stopped_at(incident: Incident) -> str:
    """The state at which the recovery waits for a person to say where to go on; empty where it does not."""
    stop = incident.escalation
    waits = incident.status is IncidentStatus.ESCALATED and stop is not None and not stop.resume_from
    return stop.failed_state if stop is not None and waits else ""
