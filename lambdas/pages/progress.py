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
    steps = (*_BEFORE, *(_AFTER_REJECTION if incident.rejected else _AFTER_APPROVAL), *_RESUME)
    done = {state: at for _, state in steps if (at := _done_at(incident, state))}
    current = _current(incident, [state for _, state in steps if state not in done])
    listed = []
    for title, state in steps:
        if state in done:
            listed.append(ProgressStep(title=title, stage=Stage.DONE, detail=moment(done[state], now)))
        elif incident.status is IncidentStatus.CLOSED:
            continue  # it was not needed: a node that had left is not quarantined
        elif state == current:
            stopped = incident.status is IncidentStatus.ESCALATED
            listed.append(ProgressStep(title=title, stage=Stage.STOPPED if stopped else Stage.NOW))
        else:
            listed.append(ProgressStep(title=title, stage=Stage.NEXT))
    return tuple(listed)


def _done_at(incident: Incident, state: str) -> str:
    """When the state was done; empty where it was not. Waiting states are done when what they wait for is recorded."""
    if state == "RequestApproval":
        return incident.approval.decision.at if incident.approval and incident.approval.decision else ""
    if state == "VerifyRecovery":
        return incident.verification.verified_at
    answers = [entry for entry in incident.timeline if entry.state == state]
    return answers[-1].at if answers and answers[-1].outcome not in _UNFINISHED else ""


def _current(incident: Incident, left: list[str]) -> str:
    stop = incident.escalation
    if incident.status is IncidentStatus.ESCALATED and stop is not None and stop.failed_state in left:
        return stop.failed_state
    return left[0] if left else ""
