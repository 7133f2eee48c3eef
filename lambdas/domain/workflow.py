"""What the domain knows of the workflow's order: status by state, and from where a stopped incident may go on."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from datetime import datetime, timedelta
from typing import Final

from lambdas.domain.incident import Incident, IncidentStatus, iso, parse_iso
from lambdas.domain.records import ConfirmationStatus, Escalation, Verification
from truestep.contract import INCIDENT_ID, parse_json

_STATUS: Final = {
    "OpenIncident": IncidentStatus.INVESTIGATING,
    "ResolveNode": IncidentStatus.INVESTIGATING,
    "CordonNode": IncidentStatus.INVESTIGATING,
    "SnapshotEvidence": IncidentStatus.INVESTIGATING,
    "StopTraining": IncidentStatus.INVESTIGATING,
    "ReadHistory": IncidentStatus.INVESTIGATING,
    "ConfirmSuspect": IncidentStatus.INVESTIGATING,
    "StartHealthCheck": IncidentStatus.INVESTIGATING,
    "RequestApproval": IncidentStatus.AWAITING_APPROVAL,
    "SettleHealthCheck": IncidentStatus.RECOVERING,
    "ReplaceNode": IncidentStatus.RECOVERING,
    "AwaitReplacement": IncidentStatus.RECOVERING,
    "ReleaseNode": IncidentStatus.RECOVERING,
    "ChooseCheckpoint": IncidentStatus.RECOVERING,
    "Relaunch": IncidentStatus.RECOVERING,
    "VerifyRecovery": IncidentStatus.VERIFYING,
    "CloseIncident": IncidentStatus.CLOSED,
    "Escalate": IncidentStatus.ESCALATED,
}

RESUMABLE_STATES: Final = tuple(state for state in _STATUS if state != "Escalate")
"""States from which a person may let an escalated incident go on, in the workflow's order."""

REMIND_OF_STOP_AFTER: Final = timedelta(hours=24)
"""People are told again of a stop that nobody has ended for so long."""

HAND_START_WITHIN: Final = timedelta(seconds=90)
"""An execution that somebody has started comes to its first state within so long, unless its function is throttled. The
last of Lambda's three attempts at an event comes later than that."""

_GIVEN_NAME: Final = re.compile(rf"({INCIDENT_ID.pattern})(-[0-9a-f]{{12}})?")
_STOP_TRAINING: Final = RESUMABLE_STATES[: RESUMABLE_STATES.index("StopTraining") + 1]
"""States that lead to a stop of the job, whatever runs."""
_LEFT_TO_DO: Final = frozenset({"CloseIncident", "Escalate"})
"""What is left to an incident that has lost its job."""
_NEED_CLAIMS: Final = frozenset(
    RESUMABLE_STATES[RESUMABLE_STATES.index("CordonNode") : RESUMABLE_STATES.index("ReleaseNode")]
)
"""States that close, use or exchange the suspect nodes, or lead to one that does."""
_BESIDE_CONFIRMATION: Final = (*RESUMABLE_STATES[: RESUMABLE_STATES.index("RequestApproval")], "CloseIncident")
"""States that lead to StartHealthCheck, which ends the confirmation's Jobs; and the end."""
_NEED_APPROVAL: Final = frozenset({"SettleHealthCheck", "ReplaceNode", "AwaitReplacement"})


def status_in(state: str) -> IncidentStatus:
    """The status of an incident whose newest answer came from `state`. Raises KeyError for an unknown state."""
    return _STATUS[state]


def job_lost(incident: Incident, state: str, *, holder: str) -> str:
    """Why the incident must not enter `state`: its job is not its own any more. Empty where it may.

    holder: id of the incident that holds the job's claim, empty where none does. Each has the claim from its opening to
    its end, unless the alarm of the run that it had relaunched opened another one. What it knows is older than that.
    """
    if holder == incident.incident_id or state in _LEFT_TO_DO or incident.status is IncidentStatus.CLOSED:
        return ""
    if not holder:
        return "a later incident had taken this job over, and is closed: close this one too, go on from CloseIncident"
    return f"incident {holder} has taken this job over: decide there, and close this one, go on from CloseIncident"


def resume_refused(incident: Incident, state: str, *, holder: str) -> str:
    """Why the incident may not go on from `state`; empty where it may. holder: as `job_lost`'s.

    Going on must not walk around the approval: replacing needs a yes, and releasing a suspect node needs a no. Nor
    around the circuit breaker and other incidents' claims, which ResolveNode has to be granted; nor leave the
    confirmation's Jobs behind, on GPUs that the health check and the relaunched job need.
    """
    if incident.status is not IncidentStatus.ESCALATED:
        return f"the incident is {incident.status}; only an escalated one waits to be told where to go on"
    if incident.escalation is not None and incident.escalation.resume_from:
        return f"the incident is already going on from {incident.escalation.resume_from}"
    if state not in RESUMABLE_STATES:
        return f"there is no state {state!r} to go on from; choose one of {', '.join(RESUMABLE_STATES)}"
    if lost := job_lost(incident, state, holder=holder):
        return lost
    unclaimed = [suspect.node_name for suspect in incident.suspects if suspect.present and not suspect.claim_key]
    if state in _NEED_CLAIMS and unclaimed and not incident.dry_run:
        return f"this incident has no claim on {', '.join(unclaimed)}, which {state} needs: go on from ResolveNode"
    if _confirming(incident) and state not in _BESIDE_CONFIRMATION:
        return (
            "the failing computation was still being run again when the execution ended: go on from ConfirmSuspect to "
            "wait for it, or from StartHealthCheck, which ends it"
        )
    decision = incident.approval.decision if incident.approval else None
    if state in _NEED_APPROVAL and not (decision and decision.approved):
        return f"{state} needs an approval: go on from RequestApproval"
    if state == "ReleaseNode" and not (decision and not decision.approved):
        return "a suspect node is released only after a rejection: go on from RequestApproval"
    return ""


def question_state(incident: Incident) -> str:
    """Where an escalated incident goes on whose question a person has answered all the same."""
    return "StartHealthCheck" if _confirming(incident) else "RequestApproval"


def _confirming(incident: Incident) -> bool:
    return incident.confirmation is not None and incident.confirmation.status is ConfirmationStatus.RUNNING


def successor_name(execution: str, incident_id: str) -> str:
    """Name of the one execution that goes on from where `execution` (an ARN) had ended."""
    return f"{incident_id}-{hashlib.sha256(execution.encode()).hexdigest()[:12]}"


def is_anothers(name: str, incident_id: str) -> bool:
    """Whether an execution has the name that the recovery gives to those of another incident."""
    found = _GIVEN_NAME.fullmatch(name)
    return found is not None and found.group(1) != incident_id


def may_drive(incident: Incident, execution: str) -> bool:
    """Whether an execution (an ARN) may act on the incident by what is on record alone.

    Nobody else has taken it up, or it is the successor of the one that did: that is started only after the end of it.
    """
    known = incident.execution
    name = execution.rpartition(":")[2]
    return known in ("", execution) or name == successor_name(known, incident.incident_id)


def answered(incident: Incident, *, state: str, outcome: str, reason: str, now: datetime) -> Incident:
    """The incident with the answer of one of the workflow's states.

    Whatever another state was waiting for is over: entered again, it waits its whole time.
    """
    waiting = {name: since for name, since in incident.waiting_since.items() if name == state}
    return incident.evolve(status=status_in(state), waiting_since=waiting).noted(
        at=now, state=state, outcome=outcome, reason=reason
    )


def last_stop(incident: Incident) -> tuple[str, str]:
    """State and reason of the newest answer that was not the escalation's own: where a Choice stopped the incident."""
    for entry in reversed(incident.timeline):
        if entry.state in RESUMABLE_STATES:
            return entry.state, entry.reason
    return "OpenIncident", "the incident has no answers yet"


def escalated(
    incident: Incident,
    *,
    failed_state: str,
    error: str,
    cause: str,
    task_token: str,
    now: datetime,
    execution: str = "",
) -> Incident:
    """The incident with its stop recorded, the token that a person's choice completes, and the execution that waits.

    Entered again for the same stop, it keeps its time: how long it has waited counts from the first.
    """
    earlier = incident.escalation
    same = earlier is not None and not earlier.resume_from and earlier.failed_state == failed_state
    return incident.evolve(
        escalation=Escalation(
            failed_state=failed_state,
            error=error[:200],
            cause=cause[:1000],
            at=earlier.at if earlier is not None and same else iso(now),
            announced_at=earlier.announced_at if earlier is not None and same else "",
            task_token=task_token,
            execution=execution,
        )
    )


_HOW_IT_ENDED: Final = {
    "ABORTED": "somebody stopped the execution",
    "TIMED_OUT": "the execution reached its time limit",
    "FAILED": "the execution failed",
}


def abandoned(incident: Incident, *, execution: str, status: str, why: str, now: datetime) -> Incident | None:
    """The incident as escalated because its execution ended in the middle; None where that is on record, or over.

    execution: ARN of the one that ended; status: how, in Step Functions' word; why: its error and cause, if any. The
    node stays as it is. A stop that waits for a person keeps its reason, and is told once more: until then the page
    said nothing of the end. Not for an incident whose choice has not been delivered: that goes on in a new execution.
    """
    stop = incident.escalation if incident.status is IncidentStatus.ESCALATED else None
    waits = stop if stop is not None and not stop.resume_from else None
    noted = waits is not None and waits.execution == execution and not waits.task_token
    if noted or incident.status is IncidentStatus.CLOSED:
        return None
    ended = ": ".join(part for part in (_HOW_IT_ENDED.get(status, f"the execution is {status}"), why) if part)
    if waits is not None:
        failed_state, error, cause = waits.failed_state, waits.error, f"{waits.cause}. Since then {ended}"
    else:
        # A choice that was delivered, but whose state has not answered, is where it stood.
        chosen = stop.resume_from if stop is not None else ""
        failed_state, error, cause = chosen or last_stop(incident)[0], f"Execution {status}", ended
    escalation = Escalation(
        failed_state=failed_state,
        error=error[:200],
        cause=cause[:900] + ". The choice of a state starts a new execution there",
        at=waits.at if waits is not None else iso(now),
        execution=execution,
    )
    # The successor that a choice will start is this one's, whether or not a state of it was entered.
    return incident.evolve(status=IncidentStatus.ESCALATED, escalation=escalation, execution=execution).noted(
        at=now, state="Escalate", outcome="waiting", reason=f"{failed_state}: {ended}"
    )


def undelivered_choice(incident: Incident, execution: str) -> bool:
    """Whether a person's choice is on record that this execution, which has ended, was to take and did not."""
    stop = incident.escalation
    return (
        incident.status is IncidentStatus.ESCALATED
        and stop is not None
        and stop.execution == execution
        and bool(stop.resume_from)
        and not stop.delivered
    )


def stop_announcement_due(incident: Incident, *, now: datetime) -> bool:
    """Whether people are to be told of the stop now: for the first time, or as a reminder."""
    stop = incident.escalation
    return stop is None or not stop.announced_at or now - parse_iso(stop.announced_at) >= REMIND_OF_STOP_AFTER


def stop_announced(incident: Incident, *, now: datetime) -> Incident | None:
    """The incident with the note that the message of its stop is out; None where it has gone on already."""
    stop = incident.escalation
    if stop is None or stop.resume_from:
        return None
    return incident.evolve(escalation=dataclasses.replace(stop, announced_at=iso(now)))


def unheard_choice(incident: Incident, failed_state: str) -> str:
    """The state that a person has chosen already without the execution hearing of it; empty where none did.

    A choice is recorded before the token is completed, and the token may have run out in between: the heartbeat of
    Escalate, or the deadline of a question that was answered in its last moment. An answer counts once: a stop after it
    is a new one, so that a state which fails again and again still waits for a person.
    """
    stop = incident.escalation
    if incident.status is IncidentStatus.ESCALATED and stop is not None and stop.resume_from and not stop.delivered:
        return stop.resume_from
    decision = incident.approval.decision if incident.approval else None
    if failed_state != "RequestApproval" or decision is None:
        return ""
    heard = stop is not None and parse_iso(stop.at) >= parse_iso(decision.at)
    return "" if heard else "RequestApproval"


def delivered(incident: Incident, task_token: str) -> Incident | None:
    """The incident with the note that the execution has taken the choice; None where it has gone on already."""
    stop = incident.escalation
    if incident.status is not IncidentStatus.ESCALATED or stop is None or stop.task_token != task_token:
        return None
    if stop.delivered:
        return None
    return incident.evolve(escalation=dataclasses.replace(stop, delivered=True))


def continued(incident: Incident, *, ended: str, successor: str, now: datetime) -> Incident | None:
    """The incident with the note that a new execution goes on from the choice; None where that is noted already.

    ended, successor: ARNs of executions.
    """
    stop = incident.escalation
    # Not the status: the new execution may have answered before this is noted.
    if stop is None or stop.execution != ended:
        return None
    name = successor.rpartition(":")[2]
    driver = successor if may_drive(incident, ended) else incident.execution
    return incident.evolve(
        escalation=dataclasses.replace(stop, execution=successor, delivered=True), execution=driver
    ).noted(
        at=now,
        state="Decision",
        outcome="restarted",
        reason=f"the execution that waited had ended: a new one, {name}, goes on from {stop.resume_from}",
    )


def readable_cause(cause: str) -> str:
    """The message inside a failed function's cause, which is JSON; any other cause as it is."""
    try:
        document = parse_json(cause)
    except ValueError:
        return cause
    message = document.get("errorMessage") if isinstance(document, dict) else None
    return message if isinstance(message, str) else cause


def resumed(incident: Incident, state: str, *, by: str, now: datetime) -> Incident:
    """The incident with a person's choice of the state to go on from. Check `resume_refused` first.

    No state waits any more: the chosen one has its whole time. What the run that follows the newest order has said of
    itself counts until a state stops it; whoever goes on from VerifyRecovery takes the problem that it had for cured.
    Raises ValueError where nothing waits for a choice.
    """
    if incident.escalation is None:
        raise ValueError("the incident is not escalated")
    verification = incident.verification
    if state in _STOP_TRAINING:
        verification = Verification()
    elif state == "VerifyRecovery":
        verification = dataclasses.replace(verification, problem="")
    return incident.evolve(
        escalation=dataclasses.replace(incident.escalation, resume_from=state, delivered=False),
        verification=verification,
        waiting_since={},
    ).noted(at=now, state="Decision", outcome="resumed", reason=f"goes on from {state}, {by}")
