"""Escalation on real services: where the execution goes on from, and that no decision is lost or overwritten."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta

import pytest

from lambdas.adapters.clock import SystemClock
from lambdas.adapters.notifications import SnsNotifier
from lambdas.close_incident.handler import handler as close_incident
from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.approval import decided
from lambdas.domain.incident import Incident, IncidentStatus, iso, open_incident, parse_iso
from lambdas.domain.records import Confirmation, ConfirmationStatus, Relaunch
from lambdas.domain.workflow import REMIND_OF_STOP_AFTER
from lambdas.escalate.handler import handler as escalate
from lambdas.read_history.handler import handler as read_history
from lambdas.receive_alarm.handler import handler as receive_alarm
from lambdas.request_approval.handler import handler as request_approval
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, link_of, notice, post, request, stop_event
from tests.adapters.store_handlers.test_intake import an_event
from tests.unit.recovery.alarms import NOW, an_alarm


def test_an_escalated_incident_goes_on_from_the_state_that_a_person_chooses(cloud: Cloud, incident: Incident) -> None:
    execution, token = cloud.waiting_execution()
    event = {
        "incident_id": incident.incident_id,
        "task_token": token,
        "failed_state": "CordonNode",
        "error": "ApiError",
        "cause": json.dumps({"errorMessage": "the API server is away", "errorType": "ApiError"}),
    }
    escalate(event, CONTEXT)
    (message,) = cloud.messages()
    assert "ApiError: the API server is away" in message["Message"]
    path, query = link_of(message)
    assert post(path, query, decision="resume", resume_from="ReplaceNode")["statusCode"] == 409
    assert cloud.still_waits(execution)
    page = post(path, query, decision="resume", resume_from="CordonNode")
    assert page["statusCode"] == 200
    assert cloud.output(execution) == {"incident_id": incident.incident_id, "resume_from": "CordonNode"}
    assert post(path, query, decision="resume", resume_from="StopTraining")["statusCode"] == 409


def test_an_answer_after_the_deadline_leads_back_to_the_question(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    execution, token = cloud.waiting_execution()
    escalate({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    assert cloud.store.load(incident.incident_id).status is IncidentStatus.ESCALATED
    assert post(path, query, decision="approve")["statusCode"] == 200
    assert cloud.output(execution) == {"incident_id": incident.incident_id, "resume_from": "RequestApproval"}
    next_execution, token = cloud.waiting_execution()
    request_approval({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    output = cloud.output(next_execution)
    assert output is not None
    assert output["outcome"] == "approved"


def test_an_answer_while_the_confirmation_runs_anew_ends_that_first(cloud: Cloud, incident: Incident) -> None:
    """Its Jobs hold GPUs that the check and the relaunched job need; StartHealthCheck leads to the question."""
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    execution, token = cloud.waiting_execution()
    escalate({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    running = Confirmation(status=ConfirmationStatus.RUNNING, reason="it runs again", at=iso(NOW))
    cloud.store.save(cloud.store.load(incident.incident_id).evolve(confirmation=running))
    assert post(path, query, decision="approve")["statusCode"] == 200
    assert cloud.output(execution) == {"incident_id": incident.incident_id, "resume_from": "StartHealthCheck"}


def test_a_choice_whose_token_had_just_run_out_is_delivered_by_the_next_entry(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    _, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "Relaunch"), CONTEXT)
    cloud.messages()
    cloud.client("stepfunctions").send_task_failure(taskToken=token, error="States.HeartbeatTimeout")
    page = post(path, query, decision="resume", resume_from="Relaunch")
    assert (page["statusCode"], "Going on from Relaunch." in page["body"]) == (200, True)
    execution, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "Relaunch"), CONTEXT)
    assert cloud.output(execution) == {"incident_id": incident.incident_id, "resume_from": "Relaunch"}
    assert cloud.messages() == [], "nobody is asked again"
    # Relaunch raises once more: the choice is used up, and people are asked.
    execution, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "Relaunch"), CONTEXT)
    assert cloud.still_waits(execution)
    assert len(cloud.messages()) == 1
    stored = cloud.store.load(incident.incident_id).escalation
    assert stored is not None
    assert stored.resume_from == ""


def test_a_choice_that_arrived_is_not_repeated_when_the_state_fails_again(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    execution, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "Relaunch"), CONTEXT)
    post(path, query, decision="resume", resume_from="Relaunch")
    assert cloud.output(execution) is not None
    execution, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "Relaunch"), CONTEXT)
    assert cloud.still_waits(execution)
    stored = cloud.store.load(incident.incident_id).escalation
    assert stored is not None
    assert stored.resume_from == ""


def test_a_stop_whose_message_never_got_out_is_told_by_the_next_entry(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(SnsNotifier, "notify", died)
        with pytest.raises(KeyboardInterrupt):
            escalate(stop_event(incident, "lost", "Relaunch"), CONTEXT)
    for told in (1, 0):
        escalate(stop_event(incident, "next", "Relaunch"), CONTEXT)
        assert len(cloud.messages()) == told
    stored = cloud.store.load(incident.incident_id)
    assert stored.escalation is not None
    long_ago = iso(parse_iso(stored.escalation.announced_at) - REMIND_OF_STOP_AFTER)
    cloud.store.save(stored.evolve(escalation=replace(stored.escalation, announced_at=long_ago)))
    escalate(stop_event(incident, "later", "Relaunch"), CONTEXT)
    assert len(cloud.messages()) == 1


def test_a_decision_cannot_overwrite_the_choice_that_the_execution_follows(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    execution, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "RequestApproval"), CONTEXT)
    assert post(path, query, decision="resume", resume_from="ChooseCheckpoint")["statusCode"] == 200
    status, said = notice(post(path, query, decision="approve"))
    assert (status, "going on from ChooseCheckpoint" in said[0]) == (409, True)
    stored = cloud.store.load(incident.incident_id)
    assert not stored.approved
    assert stored.escalation is not None
    assert cloud.output(execution) == {
        "incident_id": incident.incident_id,
        "resume_from": stored.escalation.resume_from,
    }


def test_a_decision_that_nothing_would_act_on_is_refused(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    cloud.store.save(cloud.store.load(incident.incident_id).evolve(status=IncidentStatus.VERIFYING))
    status, said = notice(post(path, query, decision="approve"))
    assert (status, "is verifying" in said[0]) == (409, True)
    assert not cloud.store.load(incident.incident_id).approved
    assert "Approve: replace" not in decide_approval(request("GET", path, query), CONTEXT)["body"]


def test_an_approval_in_the_questions_last_moment_is_acted_on(cloud: Cloud, incident: Incident) -> None:
    """The question's state had ended as expired, and Escalate had not begun."""
    ended, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    cloud.client("stepfunctions").send_task_success(taskToken=token, output="{}")
    cloud.output(ended)
    page = post(path, query, decision="approve")
    assert (page["statusCode"], "Approved at" in page["body"]) == (200, True)
    execution, token = cloud.waiting_execution()
    escalate({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    assert cloud.output(execution) == {"incident_id": incident.incident_id, "resume_from": "RequestApproval"}


def test_the_history_knows_what_became_of_earlier_incidents(cloud: Cloud, incident: Incident) -> None:
    """One rejected, one that led here, one that stands; all three named the same GPU."""
    asked(cloud, incident, cloud.waiting_execution()[1])

    def after(earlier: Incident, attempt: str) -> Incident:
        fresh = open_incident(an_alarm(attempt_id=attempt), now=NOW, dry_run=False, follows=earlier.incident_id)
        return cloud.store.open(fresh, taking_over=earlier.incident_id)

    stands = after(incident, "attempt-2").evolve(follows="")
    stands = cloud.store.save(stands)
    led_here = after(stands, "attempt-3").evolve(follows="inc-of-which-nothing-is-left")
    led_here = cloud.store.save(led_here)
    now = after(led_here, "attempt-4")
    for one in (incident, stands, led_here, now):
        cloud.store.record_gpus(one)
    asked_about = cloud.store.load(incident.incident_id)
    cloud.store.save(decided(asked_about, approve=False, by="x", comment="", now=NOW))
    answer = read_history({"incident_id": now.incident_id}, CONTEXT)
    stored = cloud.store.load(now.incident_id)
    flags = {past.incident_id: (past.rejected, past.linked) for past in stored.history}
    assert flags == {
        incident.incident_id: (True, False),
        stands.incident_id: (False, False),
        led_here.incident_id: (False, True),
    }
    assert stored.recommendation is not None
    assert f"1 earlier incident ({stands.incident_id})" in stored.recommendation.reason
    assert answer["reason"].startswith("3 earlier incidents of 1 GPU, 1 of them")


def test_an_incident_whose_relaunched_job_raised_an_alarm_can_only_be_closed(cloud: Cloud) -> None:
    first = receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"]
    now = SystemClock().now()
    incident = cloud.store.load(first)
    cloud.store.save(incident.evolve(status=IncidentStatus.VERIFYING, relaunch=Relaunch(at=iso(now))))
    again = replace(an_alarm(attempt_id="attempt-2", step=130), detected_at=iso(now + timedelta(seconds=1)))
    second = receive_alarm(an_event(again), CONTEXT)["incident_id"]
    assert second != first
    execution, token = cloud.waiting_execution()
    escalate(stop_event(incident, token, "VerifyRecovery"), CONTEXT)
    path, query = link_of(cloud.messages()[-1])
    status, (said,) = notice(post(path, query, decision="resume", resume_from="Relaunch"))
    assert status == 409
    assert f"incident {second} has taken this job over: decide there, and close this one" in said
    offered = re.findall(r'<option value="(\w+)"', decide_approval(request("GET", path, query), CONTEXT)["body"])
    assert offered == ["CloseIncident"]
    assert cloud.still_waits(execution)
    assert post(path, query, decision="resume", resume_from="CloseIncident")["statusCode"] == 200
    assert close_incident({"incident_id": first}, CONTEXT)["outcome"] == "closed"
    assert cloud.store.job_holder(incident.job) == second
