"""The steps that a person follows: what is done, what is going on, where it stopped."""

from __future__ import annotations

from datetime import timedelta

from lambdas.domain.approval import asked, decided
from lambdas.domain.incident import Incident, IncidentStatus, open_incident
from lambdas.domain.policy import Policy
from lambdas.domain.records import Verification
from lambdas.domain.workflow import escalated, resumed
from lambdas.pages.progress import Stage, progress
from lambdas.pages.times import duration, moment
from lambdas.pages.view import state_sentence
from tests.unit.recovery.alarms import NOW, an_alarm


def asking() -> Incident:
    incident = open_incident(an_alarm(), now=NOW, dry_run=False)
    for state, outcome in (("CordonNode", "cordoned"), ("SnapshotEvidence", "recorded"), ("StopTraining", "stopped")):
        incident = incident.noted(at=NOW, state=state, outcome=outcome, reason="")
    incident = incident.noted(at=NOW, state="ConfirmSuspect", outcome="skipped", reason="")
    incident = incident.noted(at=NOW, state="StartHealthCheck", outcome="started", reason="")
    incident = incident.noted(at=NOW, state="RequestApproval", outcome="waiting", reason="")
    asked_for = asked(incident, task_token="t", now=NOW, policy=Policy())
    return asked_for.evolve(status=IncidentStatus.AWAITING_APPROVAL)


def stages(incident: Incident) -> dict[str, Stage]:
    return {step.title: step.stage for step in progress(incident, NOW)}


def only(incident: Incident, stage: Stage) -> list[str]:
    return [title for title, seen in stages(incident).items() if seen is stage]


def test_a_question_is_what_goes_on_until_it_is_answered() -> None:
    assert only(asking(), Stage.NOW) == ["Decision"]
    assert only(asking(), Stage.DONE)[-1] == "Health check begun"
    assert only(decided(asking(), approve=True, by="x", comment="", now=NOW), Stage.NOW) == ["Replacement requested"]


def test_a_rejection_gives_back_and_replaces_nothing() -> None:
    seen = stages(decided(asking(), approve=False, by="x", comment="", now=NOW))
    assert seen["Node given back"] is Stage.NOW
    assert "New node ready" not in seen


def test_a_dry_run_goes_the_way_of_a_rejection_and_waits_for_nobody() -> None:
    rehearsed = asking().evolve(dry_run=True, status=IncidentStatus.RECOVERING)
    rehearsed = rehearsed.noted(at=NOW, state="RequestApproval", outcome="rejected", reason="dry run")
    assert only(rehearsed, Stage.NOW) == ["Node given back"]
    assert "waited for" in state_sentence(rehearsed, NOW)


def test_pending_and_waiting_are_not_done() -> None:
    incident = decided(asking(), approve=True, by="x", comment="", now=NOW)
    incident = incident.noted(at=NOW, state="ReplaceNode", outcome="requested", reason="")
    incident = incident.noted(at=NOW, state="AwaitReplacement", outcome="pending", reason="")
    assert only(incident, Stage.NOW) == ["New node ready"]
    waiting = incident.noted(at=NOW, state="VerifyRecovery", outcome="waiting", reason="")
    assert stages(waiting)["First audit passed"] is Stage.NEXT
    verified = waiting.evolve(verification=Verification(verified_at="2026-03-01T02:31:00Z"))
    assert stages(verified)["First audit passed"] is Stage.DONE


def test_a_stop_is_shown_where_it_is_even_when_the_state_had_answered_before() -> None:
    stopped = escalated(asking(), failed_state="StopTraining", error="E", cause="", task_token="t", now=NOW)
    stopped = stopped.evolve(status=IncidentStatus.ESCALATED)
    assert only(stopped, Stage.STOPPED) == ["Training stopped"]
    assert only(stopped, Stage.NOW) == []
    assert only(resumed(stopped, "StopTraining", by="x", now=NOW), Stage.STOPPED) == []


def test_a_closed_incident_lists_what_was_done_and_nothing_to_come() -> None:
    closed = decided(asking(), approve=True, by="x", comment="", now=NOW).evolve(status=IncidentStatus.CLOSED)
    assert set(stages(closed).values()) == {Stage.DONE}


def test_times_are_said_as_people_say_them() -> None:
    assert moment("2026-03-01T02:28:00Z", NOW) == "02:28:00 UTC on 1 March 2026 (2 minutes ago)"
    assert moment("2026-03-01T03:00:00Z", NOW) == "03:00:00 UTC on 1 March 2026"
    assert moment("2026-03-01T02:28:00Z", NOW, day=False) == "02:28:00 UTC (2 minutes ago)"
    assert moment("2026-02-28T02:28:00Z", NOW, day=False) == "02:28:00 UTC on 28 February 2026 (1 day ago)"
    assert moment("yesterday", NOW) == "yesterday"
    assert duration(timedelta(days=2, hours=1, minutes=5)) == "2 days 1 hour"
    assert duration(timedelta(hours=1)) == "1 hour"
    assert duration(timedelta(seconds=0.4)) == "0 seconds"
