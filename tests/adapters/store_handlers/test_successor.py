"""A choice of where to go on, made after the execution that waited for it has ended: one new execution follows it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lambdas.adapters import escalations
from lambdas.domain.incident import Incident
from lambdas.escalate.handler import handler as escalate
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, notice, post, stop_event


def escalated(cloud: Cloud, incident: Incident, *, ended: bool) -> tuple[str, str, dict[str, str]]:
    """The execution that waits, or waited, in Escalate, and path and query of the incident's link."""
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    execution, token = cloud.waiting_execution()
    escalate({**stop_event(incident, token, "Relaunch"), "execution": execution}, CONTEXT)
    sfn = cloud.client("stepfunctions")
    if ended:
        sfn.send_task_failure(taskToken=token, error="States.Timeout")
    deadline = time.monotonic() + 10
    while ended and sfn.describe_execution(executionArn=execution)["status"] == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return execution, path, query


def successors(cloud: Cloud) -> list[dict[str, Any]]:
    """Input of every execution of the recovery."""
    sfn = cloud.client("stepfunctions")
    listed = sfn.list_executions(stateMachineArn=cloud.state_machine_arn)["executions"]
    return [json.loads(sfn.describe_execution(executionArn=one["executionArn"])["input"]) for one in listed]


def restarts(cloud: Cloud, incident: Incident) -> list[str]:
    timeline = cloud.store.load(incident.incident_id).timeline
    return [entry.reason for entry in timeline if entry.outcome == "restarted"]


def test_it_starts_one_new_execution_from_the_chosen_state_and_says_so(cloud: Cloud, incident: Incident) -> None:
    _, path, query = escalated(cloud, incident, ended=True)
    page = post(path, query, decision="resume", resume_from="Relaunch")
    assert page["statusCode"] == 200
    assert "the execution that waited had ended: a new one" in page["body"].lower()
    assert successors(cloud) == [{"incident_id": incident.incident_id, "resume_from": "Relaunch"}]
    status, (said,) = notice(post(path, query, decision="resume", resume_from="ChooseCheckpoint"))
    assert (status, "already going on from Relaunch" in said) == (409, True)
    assert len(successors(cloud)) == 1
    assert len(restarts(cloud, incident)) == 1


def test_one_that_died_before_it_was_noted_is_not_started_twice(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    _, path, query = escalated(cloud, incident, ended=True)
    with monkeypatch.context() as broken:
        broken.setattr(escalations, "save_changed", died)
        with pytest.raises(KeyboardInterrupt):
            post(path, query, decision="resume", resume_from="Relaunch")
    # Even where the new execution has ended by then: its name is taken.
    listed = cloud.client("stepfunctions").list_executions(stateMachineArn=cloud.state_machine_arn)["executions"]
    cloud.client("stepfunctions").stop_execution(executionArn=listed[0]["executionArn"])
    assert restarts(cloud, incident) == []
    assert post(path, query, decision="resume", resume_from="Relaunch")["statusCode"] == 409
    assert len(successors(cloud)) == 1
    assert len(restarts(cloud, incident)) == 1


def test_a_successor_that_ended_before_its_first_answer_has_one_of_its_own(cloud: Cloud, incident: Incident) -> None:
    _, path, query = escalated(cloud, incident, ended=True)
    sfn = cloud.client("stepfunctions")
    post(path, query, decision="resume", resume_from="Relaunch")
    (first,) = sfn.list_executions(stateMachineArn=cloud.state_machine_arn)["executions"]
    sfn.stop_execution(executionArn=first["executionArn"])
    post(path, query, decision="resume", resume_from="Relaunch")
    assert successors(cloud) == [{"incident_id": incident.incident_id, "resume_from": "Relaunch"}] * 2


def test_while_the_execution_runs_the_choice_waits_for_escalates_next_entry(cloud: Cloud, incident: Incident) -> None:
    execution, path, query = escalated(cloud, incident, ended=False)
    other, token = cloud.waiting_execution()
    # The token that is stored has run out; the execution that it was of runs still.
    escalate({**stop_event(incident, token, "Relaunch"), "execution": execution}, CONTEXT)
    cloud.client("stepfunctions").send_task_failure(taskToken=token, error="States.HeartbeatTimeout")
    assert execution != other
    assert post(path, query, decision="resume", resume_from="Relaunch")["statusCode"] == 200
    assert successors(cloud) == []
    assert cloud.still_waits(execution)


def test_an_answer_after_the_deadline_leads_an_ended_execution_back_to_the_question(
    cloud: Cloud, incident: Incident
) -> None:
    _, path, query = escalated(cloud, incident, ended=True)
    assert post(path, query, decision="approve")["statusCode"] == 200
    assert successors(cloud) == [{"incident_id": incident.incident_id, "resume_from": "RequestApproval"}]
