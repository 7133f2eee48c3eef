"""Takes up an execution that ended without closing its incident: stopped by hand, failed, out of time or of a quota.

Step Functions tells the account's default bus of every end. The event is only a hint: what happened to which incident
is asked of Step Functions and of the table. The incident is then escalated like one whose state failed: everything
stays as it is, people are told, and their choice starts a new execution. Where somebody has started one by hand
meanwhile, it is left the time to take the incident up: people are not told of a stop that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from lambdas.adapters.approval_links import KmsLinks
from lambdas.adapters.aws import client
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.escalations import go_on_anew, tell_of_stop
from lambdas.adapters.executions import Execution, StepFunctions
from lambdas.adapters.notifications import SnsNotifier
from lambdas.adapters.retrying import save_changed
from lambdas.adapters.runtime import incident_store, log, normalised_errors, traced
from lambdas.domain.errors import AlarmRefusedError, TransientError
from lambdas.domain.incident import Incident
from lambdas.domain.workflow import HAND_START_WITHIN, abandoned, may_drive, undelivered_choice
from lambdas.settings import Settings, settings_from_environment
from truestep.contract import parse_json


def notice_end(event: dict[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001 - Lambda's signature
    """Escalate the incident of an ended execution; twice is once. ``event["detail"]["executionArn"]`` names it.

    Raises `AlarmRefusedError` for an execution that is not the recovery's, or whose input names no incident.
    """
    with normalised_errors():
        settings = settings_from_environment("notice_end")
        executions = StepFunctions(client("stepfunctions"), settings.state_machine_arn)
        ended = _ended(executions, event, settings.state_machine_arn)
        incident_id = _incident_id(ended)
        done = "it closed its incident, or did nothing because another execution drives it"
        if ended.status != "SUCCEEDED":
            done = _take_up(settings, executions, ended, incident_id)
        log("notice_end", "end noticed", incident_id=incident_id, execution=ended.arn, status=ended.status, reason=done)
        return {"incident_id": incident_id, "reason": done}


def _ended(executions: StepFunctions, event: Mapping[str, Any], state_machine_arn: str) -> Execution:
    detail = event.get("detail")
    arn = str(detail.get("executionArn")) if isinstance(detail, Mapping) else ""
    if not arn.startswith(state_machine_arn.replace(":stateMachine:", ":execution:", 1) + ":"):
        raise AlarmRefusedError(f"{arn or 'nothing'} is no execution of {state_machine_arn}: check the rule's pattern")
    found = executions.find(arn)
    if found is None or found.running:
        # What Step Functions describes follows what it tells the bus by a moment.
        raise TransientError(f"Step Functions does not say yet that {arn} has ended")
    return found


def _incident_id(ended: Execution) -> str:
    try:
        given = parse_json(ended.given)
    except ValueError:
        given = None
    named = given.get("incident_id") if isinstance(given, Mapping) else None
    if not named or not isinstance(named, str):
        raise AlarmRefusedError(
            f"the input of {ended.arn} names no incident: {ended.given[:200]}. Somebody started it by hand with "
            'another input than {"incident_id": "inc-..."}; nothing is to be done'
        )
    return named


def _take_up(settings: Settings, executions: StepFunctions, ended: Execution, incident_id: str) -> str:
    store, now = incident_store(settings), SystemClock().now()
    successor = executions.successor(ended.arn, incident_id)
    elsewhere, beside = False, ""

    def change(incident: Incident) -> Incident | None:
        nonlocal elsewhere, beside
        # Asked after the incident was read: whatever a successor wrote into it, the successor is there to be seen.
        elsewhere = executions.find(successor) is not None
        if elsewhere:
            return None
        # Two executions of one incident: somebody started one by hand, and the other one drives it.
        beside = executions.running(incident_id, incident.execution)
        if not may_drive(incident, beside):
            beside = ""  # Its first state will refuse it.
        if beside or not may_drive(incident, ended.arn) or undelivered_choice(incident, ended.arn):
            return None
        stopped = abandoned(incident, execution=ended.arn, status=ended.status, why=ended.why, now=now)
        if stopped is not None:
            _leave_time(executions, ended, incident_id, now=now)
        return stopped

    incident = save_changed(store, incident_id, change)
    if elsewhere:
        return f"its incident goes on in {successor}"
    if beside:
        return f"its incident runs in {beside}: the end of this one changes nothing"
    if not may_drive(incident, ended.arn):
        return f"{incident.execution} drove its incident, this one did nothing: its end changes nothing"
    if undelivered_choice(incident, ended.arn):
        go_on_anew(store, executions, incident, now=now)
        return f"a person had decided already: {successor} was started from there"
    stop = incident.escalation
    if stop is None or stop.execution != ended.arn or stop.resume_from:
        return f"nothing is left to do, the incident is {incident.status}"
    tell_of_stop(
        store,
        KmsLinks(client("kms"), settings.hmac_key_id, settings.approval_url),
        SnsNotifier(client("sns"), settings.topic_arn),
        incident,
        now=now,
        valid=timedelta(hours=settings.policy(incident.job.cluster_arn).link_valid_hours),
    )
    return f"escalated: {stop.cause}"


def _leave_time(executions: StepFunctions, ended: Execution, incident_id: str, *, now: datetime) -> None:
    """Raise `TransientError` while an execution that was started by hand may be about to take the incident up.

    The event comes again then, and finds that it drives, or has ended, or has not come to its first state for too long.
    """
    if ended.stopped_at is None or now - ended.stopped_at >= HAND_START_WITHIN:
        return
    if started := executions.started_by_hand(incident_id):
        raise TransientError(f"{started} was started by hand: it is not known yet whether it takes {incident_id} up")


handler = traced("notice_end", notice_end)
