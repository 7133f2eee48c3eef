"""An execution that ends in the middle: its incident is escalated by itself, once, and a choice starts a new one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.notifications import SnsNotifier
from lambdas.domain.errors import AlarmRefusedError, TransientError
from lambdas.domain.incident import Incident, IncidentStatus, open_incident
from lambdas.escalate.handler import handler as escalate
from lambdas.notice_end.handler import handler as notice_end
from lambdas.stop_training.handler import STATE as STOP_TRAINING
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, link_of, post, stop_event
from tests.unit.recovery.alarms import NOW, an_alarm


def started(cloud: Cloud, incident: Incident, name: str = "", given: str = "") -> str:
    """Start an execution as intake does, or by hand under another name or with another input; its ARN."""
    sfn = cloud.client("stepfunctions")
    arn: str = sfn.start_execution(
        stateMachineArn=cloud.state_machine_arn,
        name=name or incident.incident_id,
        input=given or json.dumps({"incident_id": incident.incident_id}),
    )["executionArn"]
    return arn


def aborted(cloud: Cloud, execution: str) -> dict[str, Any]:
    """Stop the execution by hand; returns the event of its end."""
    sfn = cloud.client("stepfunctions")
    sfn.stop_execution(executionArn=execution)
    deadline = time.monotonic() + 10
    while sfn.describe_execution(executionArn=execution)["status"] == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return end_of(execution)


def end_of(execution: str) -> dict[str, Any]:
    return {"source": "aws.states", "detail": {"executionArn": execution, "status": "ABORTED"}}


def inputs(cloud: Cloud) -> list[dict[str, Any]]:
    """Input of every execution of the recovery, oldest first."""
    sfn = cloud.client("stepfunctions")
    listed = sfn.list_executions(stateMachineArn=cloud.state_machine_arn)["executions"]
    described = [sfn.describe_execution(executionArn=one["executionArn"]) for one in listed]
    return [json.loads(one["input"]) for one in sorted(described, key=lambda one: one["startDate"])]


def escalations(cloud: Cloud, incident: Incident) -> list[str]:
    return [entry.reason for entry in cloud.store.load(incident.incident_id).timeline if entry.state == "Escalate"]


def test_people_are_told_once_and_their_choice_starts_a_new_execution(cloud: Cloud, incident: Incident) -> None:
    stopping = incident.evolve(status=IncidentStatus.INVESTIGATING)
    cloud.store.save(stopping.noted(at=NOW, state=STOP_TRAINING, outcome="pending", reason="2 pods are still there"))
    event = aborted(cloud, started(cloud, incident))
    for _ in range(2):
        assert "escalated: somebody stopped the execution" in notice_end(event, CONTEXT)["reason"]
    (message,) = cloud.messages()
    assert "stopped at StopTraining" in message["Message"]
    assert "somebody stopped the execution. The choice of a state starts a new execution there" in message["Message"]
    assert escalations(cloud, incident) == ["StopTraining: somebody stopped the execution"]
    stored = cloud.store.load(incident.incident_id)
    assert stored.status is IncidentStatus.ESCALATED

    path, query = link_of(message)
    assert post(path, query, decision="resume", resume_from="StopTraining")["statusCode"] == 200
    assert inputs(cloud)[1:] == [{"incident_id": incident.incident_id, "resume_from": "StopTraining"}]
    # The event comes once more, late: the incident goes on elsewhere.
    assert "goes on in" in notice_end(event, CONTEXT)["reason"]
    assert (cloud.messages(), len(escalations(cloud, incident))) == ([], 1)


def test_a_question_whose_execution_was_stopped_can_still_be_answered(cloud: Cloud, incident: Incident) -> None:
    execution = started(cloud, incident)
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    notice_end(aborted(cloud, execution), CONTEXT)
    (message,) = cloud.messages()
    assert "stopped at RequestApproval" in message["Message"]
    assert post(path, query, decision="approve")["statusCode"] == 200
    assert cloud.store.load(incident.incident_id).approved
    assert inputs(cloud)[1:] == [{"incident_id": incident.incident_id, "resume_from": "RequestApproval"}]


def test_a_stop_that_waited_keeps_its_reason_and_is_told_again(cloud: Cloud, incident: Incident) -> None:
    execution = started(cloud, incident)
    event = {**stop_event(incident, "token", "Relaunch"), "cause": "no capacity", "execution": execution}
    escalate(event, CONTEXT)
    cloud.messages()
    assert notice_end(aborted(cloud, execution), CONTEXT)["reason"].startswith("escalated: no capacity. Since then")
    (message,) = cloud.messages()
    assert "stopped at Relaunch" in message["Message"]
    assert "E: no capacity. Since then somebody stopped the execution" in message["Message"]


def test_a_choice_that_the_execution_never_took_goes_on_without_a_person(cloud: Cloud, incident: Incident) -> None:
    execution = started(cloud, incident)
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    escalate({**stop_event(incident, "used", "Relaunch"), "execution": execution}, CONTEXT)
    cloud.messages()
    # Its token has run out, and the execution runs: Escalate's next entry would deliver it.
    post(path, query, decision="resume", resume_from="ChooseCheckpoint")
    assert len(inputs(cloud)) == 1
    for _ in range(2):
        notice_end(aborted(cloud, execution), CONTEXT)
    assert inputs(cloud)[1:] == [{"incident_id": incident.incident_id, "resume_from": "ChooseCheckpoint"}]
    assert cloud.messages() == []


def test_an_execution_that_took_the_choice_and_ended_before_its_answer_stopped_there(
    cloud: Cloud, incident: Incident
) -> None:
    execution = started(cloud, incident)
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    _, token = cloud.waiting_execution()
    escalate({**stop_event(incident, token, "Relaunch"), "execution": execution}, CONTEXT)
    cloud.messages()
    post(path, query, decision="resume", resume_from="ChooseCheckpoint")
    notice_end(aborted(cloud, execution), CONTEXT)
    assert "stopped at ChooseCheckpoint" in cloud.messages()[0]["Message"]
    assert len(inputs(cloud)) == 1


def test_one_that_died_before_the_message_sends_it_when_it_is_called_again(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    event = aborted(cloud, started(cloud, incident))
    with monkeypatch.context() as broken:
        broken.setattr(SnsNotifier, "notify", died)
        with pytest.raises(KeyboardInterrupt):
            notice_end(event, CONTEXT)
    notice_end(event, CONTEXT)
    assert len(cloud.messages()) == 1
    assert len(escalations(cloud, incident)) == 1


def test_a_closed_incident_stays_closed(cloud: Cloud, incident: Incident) -> None:
    closed = cloud.store.save(incident.evolve(status=IncidentStatus.CLOSED))
    assert "nothing is left to do" in notice_end(aborted(cloud, started(cloud, incident)), CONTEXT)["reason"]
    assert cloud.store.load(incident.incident_id) == closed
    assert cloud.messages() == []


def test_a_successor_that_is_there_before_the_choice_is_noted_is_not_taken_for_an_end(
    cloud: Cloud, incident: Incident
) -> None:
    execution = started(cloud, incident)
    event = aborted(cloud, execution)
    StepFunctions(cloud.client("stepfunctions"), cloud.state_machine_arn).succeed(
        execution, incident.incident_id, "OpenIncident"
    )
    assert "goes on in" in notice_end(event, CONTEXT)["reason"]
    assert cloud.store.load(incident.incident_id).status is IncidentStatus.OPEN


def test_the_end_of_one_that_was_started_by_hand_beside_the_recovery_changes_nothing(
    cloud: Cloud, incident: Incident
) -> None:
    ours = started(cloud, incident)
    stray = started(cloud, incident, name="by-hand")
    said = notice_end(aborted(cloud, stray), CONTEXT)["reason"]
    assert said == f"its incident runs in {ours}: the end of this one changes nothing"
    assert cloud.store.load(incident.incident_id) == incident
    assert cloud.messages() == []
    # A successor, and its own, are the recovery too.
    notice_end(aborted(cloud, ours), CONTEXT)
    path, query = link_of(cloud.messages()[0])
    post(path, query, decision="resume", resume_from="StopTraining")
    again = StepFunctions(cloud.client("stepfunctions"), cloud.state_machine_arn).successor(ours, incident.incident_id)
    assert f"runs in {again}" in notice_end(end_of(stray), CONTEXT)["reason"]
    # Once none runs any more, the last end is the recovery's.
    assert "escalated" in notice_end(aborted(cloud, again), CONTEXT)["reason"]


def test_one_started_by_hand_that_waits_for_a_person_is_the_recovery(cloud: Cloud, incident: Incident) -> None:
    ours, by_hand = started(cloud, incident), started(cloud, incident, name="by-hand")
    escalate({**stop_event(incident, "token", "Relaunch"), "execution": by_hand}, CONTEXT)
    cloud.messages()
    assert f"runs in {by_hand}" in notice_end(aborted(cloud, ours), CONTEXT)["reason"]
    assert cloud.messages() == []


@pytest.mark.parametrize("given", ["[]", "3", '"x"', "null", "{}", '{"incident_id": null}', '{"incident_id": ""}'])
def test_an_input_that_names_no_incident_is_refused_with_a_sentence(
    cloud: Cloud, incident: Incident, given: str
) -> None:
    event = aborted(cloud, started(cloud, incident, given=given))
    with pytest.raises(AlarmRefusedError, match="names no incident"):
        notice_end(event, CONTEXT)


def test_what_the_event_says_is_not_believed(cloud: Cloud, incident: Incident) -> None:
    running = started(cloud, incident)
    with pytest.raises(TransientError, match="does not say yet"):
        notice_end(end_of(running), CONTEXT)
    with pytest.raises(TransientError, match="does not say yet"):
        notice_end(end_of(f"{running}-unknown"), CONTEXT)
    others, _ = cloud.waiting_execution()
    for event in (end_of(others), {"detail": None}, {}):
        with pytest.raises(AlarmRefusedError, match="is no execution of"):
            notice_end(event, CONTEXT)
    assert cloud.store.load(incident.incident_id).status is IncidentStatus.OPEN


class _KilledError(BaseException):
    """The function's process is gone."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_of_its_calls_it_tells_people_when_it_is_called_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    call = BaseClient._make_api_call
    killed: list[str] = []
    while True:
        incident = cloud.store.open(open_incident(an_alarm(job_name=f"job-{len(killed)}"), now=NOW, dry_run=False))
        event = aborted(cloud, started(cloud, incident))
        left = iter(range(len(killed), -1, -1))

        def dies(self: Any, operation: str, given: Any, left: Iterator[int] = left) -> Any:
            if next(left):
                return call(self, operation, given)
            with suppress(ClientError):  # as where it asks for what is not there
                if after:
                    call(self, operation, given)
            killed.append(operation)
            raise _KilledError

        at_call = len(killed)
        with monkeypatch.context() as patched:
            patched.setattr(BaseClient, "_make_api_call", dies)
            with suppress(_KilledError):
                notice_end(event, CONTEXT)
        if len(killed) == at_call:
            break
        notice_end(event, CONTEXT)
        assert cloud.store.load(incident.incident_id).status is IncidentStatus.ESCALATED
        assert len(escalations(cloud, incident)) == 1, killed[-1]
        # A message that is out before the record says so goes out again.
        told = len(cloud.messages())
        assert told in ((1, 2) if killed[-1] in ("Publish", "GetItem", "PutItem") else (1,)), killed[-1]
    assert {"DescribeExecution", "ListExecutions", "GetItem", "PutItem", "GenerateMac", "Publish"} == set(killed)
