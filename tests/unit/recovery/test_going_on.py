"""Where a stopped incident may go on from, and that a person's choice counts once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from lambdas.domain.approval import asked, decided, decision_refused
from lambdas.domain.cluster_resolution import claimed, unclaimed
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.policy import Policy
from lambdas.domain.workflow import (
    RESUMABLE_STATES,
    delivered,
    escalated,
    job_lost,
    last_stop,
    readable_cause,
    resume_refused,
    resumed,
    unheard_choice,
)
from tests.unit.recovery.alarms import NOW
from tests.unit.recovery.test_decisions import an_incident as alarmed

POLICY = Policy()


def an_incident() -> Incident:
    """One whose suspect ResolveNode has claimed."""
    incident = alarmed()
    return incident.evolve(suspects=claimed(incident.suspects))


def refused(incident: Incident, state: str) -> str:
    """Why the incident, which holds its job, may not go on from there."""
    return resume_refused(incident, state, holder=incident.incident_id)


def test_going_on_cannot_walk_around_the_approval() -> None:
    stopped = escalated(an_incident(), failed_state="X", error="E", cause="c", task_token="t", now=NOW)
    stopped = stopped.evolve(status=IncidentStatus.ESCALATED)
    for state in ("SettleHealthCheck", "ReplaceNode", "AwaitReplacement", "ReleaseNode"):
        assert "approval" in refused(stopped, state) or "rejection" in refused(stopped, state)
    assert refused(stopped, "Escalate")
    assert refused(stopped, "StopTraining") == ""
    question = asked(stopped, task_token="t", now=NOW, policy=POLICY)
    approved = decided(question, approve=True, by="x", comment="", now=NOW)
    assert refused(approved, "ReplaceNode") == ""
    assert refused(approved, "ReleaseNode")
    rejected = decided(question, approve=False, by="x", comment="", now=NOW)
    assert refused(rejected, "ReplaceNode")
    assert refused(rejected, "ReleaseNode") == ""


def test_going_on_cannot_walk_around_the_circuit_breaker_or_another_incidents_claim() -> None:
    incident = alarmed().evolve(status=IncidentStatus.ESCALATED)
    stopped = escalated(incident, failed_state="ResolveNode", error="", cause="", task_token="t", now=NOW)
    for state in ("CordonNode", "StopTraining", "ConfirmSuspect", "RequestApproval", "SettleHealthCheck"):
        assert "go on from ResolveNode" in refused(stopped, state), state
        assert "go on from ResolveNode" not in refused(stopped.evolve(dry_run=True), state), "a dry run claims nothing"
    for state in ("OpenIncident", "ResolveNode", "ChooseCheckpoint", "Relaunch", "CloseIncident"):
        assert refused(stopped, state) == ""
    gone = stopped.evolve(suspects=tuple(replace(suspect, present=False) for suspect in stopped.suspects))
    assert refused(gone, "StopTraining") == ""
    ours = stopped.evolve(suspects=claimed(stopped.suspects))
    assert refused(ours, "CordonNode") == ""
    assert refused(ours.evolve(suspects=unclaimed(ours.suspects)), "CordonNode"), "released after a rejection"


def test_an_incident_that_is_not_escalated_or_goes_on_already_cannot_be_resumed() -> None:
    assert refused(an_incident(), "StopTraining")
    stopped = escalated(an_incident(), failed_state="X", error="E", cause="c", task_token="t", now=NOW)
    going = resumed(stopped.evolve(status=IncidentStatus.ESCALATED), "StopTraining", by="x", now=NOW)
    assert "already going on" in refused(going, "CordonNode")


@pytest.mark.parametrize(
    ("holder", "said"), [("inc-next", "incident inc-next has taken"), ("", "a later incident had")]
)
def test_an_incident_that_has_lost_its_job_goes_on_from_its_end_alone(holder: str, said: str) -> None:
    stopped = escalated(an_incident(), failed_state="X", error="E", cause="c", task_token="t", now=NOW)
    stopped = stopped.evolve(status=IncidentStatus.ESCALATED)
    for state in RESUMABLE_STATES:
        found = resume_refused(stopped, state, holder=holder)
        assert found.startswith(said) != (state == "CloseIncident"), state
    assert "go on from CloseIncident" in resume_refused(stopped, "Relaunch", holder=holder)
    closed = stopped.evolve(status=IncidentStatus.CLOSED)
    assert job_lost(closed, "OpenIncident", holder=holder) == "", "it only says that it is closed"
    assert job_lost(stopped, "Escalate", holder=holder) == ""


def test_a_stop_by_choice_is_found_in_the_timeline_and_a_functions_error_is_readable() -> None:
    incident = an_incident().noted(at=NOW, state="ResolveNode", outcome="escalate", reason="no such pod")
    incident = incident.noted(at=NOW, state="Decision", outcome="x", reason="y")
    assert last_stop(incident) == ("ResolveNode", "no such pod")
    assert readable_cause('{"errorMessage": "no route", "errorType": "ApiError"}') == "no route"
    assert readable_cause("States.Timeout") == "States.Timeout"


def test_every_resumable_state_has_a_status() -> None:
    assert len(set(RESUMABLE_STATES)) == 17


def stopped_at(state: str, incident: Incident, *, minutes: int = 0) -> Incident:
    at = NOW + timedelta(minutes=minutes)
    stop = escalated(incident, failed_state=state, error="", cause="", task_token=f"token {minutes}", now=at)
    return stop.evolve(status=IncidentStatus.ESCALATED)


def test_a_choice_that_the_execution_has_not_heard_counts_once() -> None:
    chosen = resumed(stopped_at("Relaunch", an_incident()), "Relaunch", by="x", now=NOW)
    assert unheard_choice(chosen, "Relaunch") == "Relaunch"
    assert delivered(chosen, "another token") is None
    heard_of = delivered(chosen, "token 0")
    assert heard_of is not None
    assert unheard_choice(heard_of, "Relaunch") == "", "it failed again: a new stop, and a person is asked"
    assert delivered(heard_of, "token 0") is None
    assert unheard_choice(chosen.evolve(status=IncidentStatus.RECOVERING), "ReplaceNode") == ""


def test_an_answer_in_the_last_moment_of_the_question_leads_back_to_it_once() -> None:
    question = asked(an_incident(), task_token="t", now=NOW, policy=POLICY)
    assert unheard_choice(question, "RequestApproval") == ""
    answered = decided(question, approve=True, by="x", comment="", now=NOW + timedelta(minutes=1))
    assert unheard_choice(answered, "RequestApproval") == "RequestApproval"
    assert unheard_choice(answered, "Relaunch") == ""
    again = stopped_at("RequestApproval", answered, minutes=2)
    assert unheard_choice(again, "RequestApproval") == ""


def test_a_decision_is_taken_only_where_something_acts_on_it() -> None:
    question = asked(an_incident(), task_token="t", now=NOW, policy=POLICY)

    def refused(incident: Incident) -> str:
        return decision_refused(incident, approve=True, acknowledged=True, by_link=True, policy=POLICY)

    for status in set(IncidentStatus) - {IncidentStatus.AWAITING_APPROVAL, IncidentStatus.ESCALATED}:
        assert f"is {status}" in refused(question.evolve(status=status))
    assert refused(question.evolve(status=IncidentStatus.AWAITING_APPROVAL)) == ""
    waits = stopped_at("RequestApproval", question)
    assert refused(waits) == ""
    assert "going on from ChooseCheckpoint" in refused(resumed(waits, "ChooseCheckpoint", by="x", now=NOW))
