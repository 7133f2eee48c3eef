"""A decision given by starting the state machine ``approve``: read from the execution, not from who calls."""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

import pytest

from lambdas.adapters.decision_mac import KmsDecisionMacs
from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.decision import digest_of
from lambdas.domain.errors import TransientError
from lambdas.domain.incident import Incident
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked


def started(cloud: Cloud, given: object, *, machine: str = "") -> str:
    """ARN of an execution with this input, which runs until it is stopped."""
    text = given if isinstance(given, str) else json.dumps(given)
    arn: str = cloud.client("stepfunctions").start_execution(
        stateMachineArn=machine or cloud.approve_machine_arn, name=uuid.uuid4().hex, input=text
    )["executionArn"]
    return arn


def decide(execution: str) -> dict[str, Any]:
    answer: dict[str, Any] = decide_approval({"decide": {"execution": execution}}, CONTEXT)
    return answer


def approval_of(incident: Incident) -> dict[str, Any]:
    return {"incident_id": incident.incident_id, "decision": "approve", "comment": "seen the charts"}


def test_the_record_names_the_execution_and_is_signed_and_the_recovery_goes_on(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"replacement_by_link": False}))
    waiting, token = cloud.waiting_execution()
    asked(cloud, incident, token)
    execution = started(cloud, approval_of(incident))
    answer = decide(execution)
    stored = cloud.store.load(incident.incident_id)
    assert stored.approval is not None
    decision = stored.approval.decision
    assert decision is not None
    assert answer == {
        "status": 200,
        "incident_id": incident.incident_id,
        "notice": f"approved at {decision.at}, by console, execution {execution}",
    }
    assert (decision.approved, decision.comment) == (True, "seen the charts")
    assert decision.decided_by == f"by console, execution {execution}"
    assert KmsDecisionMacs(cloud.client("kms"), cloud.decision_key_id).verifies(
        digest_of(stored, decision), decision.mac
    )
    output = cloud.output(waiting)
    assert output is not None
    assert output["outcome"] == "approved"
    # The state machine asks again where the first answer was lost.
    assert decide(execution) == answer
    assert cloud.store.load(incident.incident_id).timeline == stored.timeline
    second = decide(started(cloud, {**approval_of(incident), "decision": "reject"}))
    assert (second["status"], "the first decision stands" in second["notice"]) == (409, True)


def test_only_an_execution_of_approve_that_runs_decides(cloud: Cloud, incident: Incident) -> None:
    asked(cloud, incident, cloud.waiting_execution()[1])
    over = started(cloud, approval_of(incident))
    cloud.client("stepfunctions").stop_execution(executionArn=over)
    recovery = started(cloud, approval_of(incident), machine=cloud.state_machine_arn)
    look_alike = recovery.replace(":recovery-", ":approve-")
    for execution, said in ((over, "is over"), (recovery, "not proved"), ("", "not proved"), ("[]", "not proved")):
        answer = decide(execution)
        assert (answer["status"], said in answer["notice"]) == (403, True), answer
    with pytest.raises(TransientError, match="does not know the execution"):
        decide(look_alike)
    approval = cloud.store.load(incident.incident_id).approval
    assert approval is not None
    assert approval.decision is None


NO_DECISIONS: list[tuple[Any, int, str]] = [
    ("[1]", 403, "the input is no object"),
    ('"\\ud800"', 403, "not JSON in Unicode"),
    ({"comment": "\ud800"}, 403, "not JSON in Unicode"),
    ({"acknowledged": True}, 403, "no field 'acknowledged'; there are incident_id, decision, comment, acknowledge"),
    ({"acknowledge": "yes"}, 403, "acknowledge is true or false"),
    ({"comment": 1}, 403, "comment is text"),
    ({"decision": "resume"}, 403, 'decision "approve" or "reject"'),
    ({"decision": None}, 403, "decision is text"),
    ({"incident_id": ""}, 403, "give incident_id"),
    ({"incident_id": "inc-nowhere"}, 404, "no incident inc-nowhere is in the table"),
    ({"decision": "reject", "comment": " "}, 400, "a rejection needs a reason"),
]


def test_what_is_no_decision_is_refused_by_a_sentence(cloud: Cloud, incident: Incident) -> None:
    asked(cloud, incident, cloud.waiting_execution()[1])
    for changed, status, said in NO_DECISIONS:
        given = changed if isinstance(changed, str) else {**approval_of(incident), **changed}
        answer = decide(started(cloud, given))
        assert (answer["status"], said in answer["notice"]) == (status, True), answer
    approval = cloud.store.load(incident.incident_id).approval
    assert approval is not None
    assert approval.decision is None


def test_other_jobs_pods_are_acknowledged_in_the_input(cloud: Cloud, incident: Incident) -> None:
    (suspect, *_) = incident.suspects
    shared = incident.with_suspect(dataclasses.replace(suspect, other_pods=("team-b/web-1",)))
    incident = cloud.store.save(shared)
    asked(cloud, incident, cloud.waiting_execution()[1])
    refused = decide(started(cloud, approval_of(incident)))
    assert (refused["status"], "would be lost" in refused["notice"]) == (409, True)
    assert decide(started(cloud, {**approval_of(incident), "acknowledge": True}))["status"] == 200
