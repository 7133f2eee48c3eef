"""What a run that resumed for an incident says, which of it counts, and what the recovery cost."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lambdas.domain.cluster_relaunch import newly_ordered, standing_order
from lambdas.domain.incident import Incident, IncidentStatus, iso, open_incident
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import CheckpointChoice, Relaunch, Verification
from lambdas.domain.report import costs, report, summary
from lambdas.domain.verification import given_up, heard, verdict_on_recovery
from lambdas.domain.workflow import escalated, resumed
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import CheckpointRef, DetailType, ResumeEvent, Step

ORDERED = CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32)
LATEST = CheckpointRef(uri="s3://x/latest", step=Step(119), manifest_sha256="cd" * 32)
OLDER = CheckpointRef(uri="s3://x/older", step=Step(89), manifest_sha256="ef" * 32)
LATER = NOW + timedelta(hours=2)


def chosen(ref: CheckpointRef = ORDERED) -> Incident:
    incident = open_incident(an_alarm(), now=NOW, dry_run=False)
    return incident.evolve(checkpoint=CheckpointChoice(checkpoint=ref, reason="r", lost_steps=21))


def ordered() -> Incident:
    return newly_ordered(chosen(), answers=(), now=NOW)[0]


def order_of(incident: Incident) -> str:
    assert incident.relaunch is not None
    return incident.relaunch.orders[-1]


def says(incident: Incident, step: int, ref: CheckpointRef = ORDERED, *, order: str = "", **run: object) -> ResumeEvent:
    """The event of a run that follows the incident's newest order, or another one."""
    return ResumeEvent(
        run=an_alarm(**{"attempt_id": "attempt-2", **run}).run,
        incident_id=incident.incident_id,
        directive_sha256=order or order_of(incident),
        checkpoint=ref,
        step=Step(step),
        nodes=("n1",),
    )


def verified(incident: Incident, event: ResumeEvent) -> Incident:
    return heard(incident, event, DetailType.VERIFIED, now=NOW)


def outcome(incident: Incident) -> Outcome | None:
    answer = verdict_on_recovery(incident)
    return None if answer is None else answer[0]


def stopped(incident: Incident, state: str = "VerifyRecovery") -> Incident:
    stop = escalated(incident, failed_state=state, error="", cause="", task_token="t", now=NOW)
    return stop.evolve(status=IncidentStatus.ESCALATED)


def test_the_first_passing_audit_after_the_ordered_resume_verifies() -> None:
    incident = ordered()
    resumed_run = heard(incident, says(incident, 100), DetailType.RESUMED, now=NOW)
    assert outcome(resumed_run) is None
    assert outcome(verified(resumed_run, says(incident, 110))) is Outcome.VERIFIED


@pytest.mark.parametrize(("ref", "run"), [(LATEST, {}), (OLDER, {}), (ORDERED, {"run_id": "another-run"})])
def test_a_passing_audit_of_another_run_or_checkpoint_verifies_nothing(ref: CheckpointRef, run: dict[str, str]) -> None:
    incident = ordered()
    assert outcome(verified(incident, says(incident, 110, ref, order="0" * 64, **run))) is Outcome.ESCALATE


def test_nothing_proves_a_recovery_that_has_ordered_nothing() -> None:
    assert outcome(verified(chosen(), says(ordered(), 110))) is Outcome.ESCALATE


def test_a_restart_under_the_order_goes_on_from_its_own_runs_progress() -> None:
    """Before its Training Verified was heard; under no order, or from below the ordered step, it is another run."""
    incident = ordered()
    first = heard(incident, says(incident, 100), DetailType.RESUMED, now=NOW)
    again = heard(first, says(incident, 120, LATEST, attempt_id="attempt-3"), DetailType.RESUMED, now=LATER)
    assert again.verification.problem == ""
    assert outcome(verified(again, says(incident, 130, LATEST, attempt_id="attempt-3"))) is Outcome.VERIFIED
    assert again.verification.resumed_at == iso(NOW), "training has gone on since the first"
    assert again.relaunch is not None
    assert again.relaunch.attempts == ("attempt-2", "attempt-3")
    assert outcome(verified(incident, says(incident, 130, OLDER))) is Outcome.ESCALATE


def test_what_a_run_says_late_that_follows_an_earlier_order_proves_nothing() -> None:
    first = ordered()
    second, _ = newly_ordered(chosen(OLDER).evolve(relaunch=first.relaunch), answers=(), now=LATER)
    for kind in (DetailType.RESUMED, DetailType.VERIFIED):
        told = heard(second, says(first, 110), kind, now=LATER)
        assert told.verification == Verification(), "neither a proof nor a resume from elsewhere"
        assert "follows an earlier order" in told.timeline[-1].reason
        assert told.relaunch is not None
        assert told.relaunch.attempts == ("attempt-2",), "its alarms are the recovery's all the same"
    assert outcome(verified(second, says(second, 100, OLDER, attempt_id="attempt-3"))) is Outcome.VERIFIED


def test_what_was_heard_before_a_new_order_is_not_its_runs_word() -> None:
    first = ordered()
    proved = verified(first, says(first, 110))
    again, _ = newly_ordered(proved, answers=(), now=LATER)
    assert outcome(again) is None


def test_another_checkpoint_may_be_chosen_while_the_run_runs_that_follows_the_order() -> None:
    incident, order = newly_ordered(chosen(), answers=(), now=NOW)
    running = heard(incident, says(incident, 100), DetailType.RESUMED, now=NOW)
    elsewhere = running.evolve(checkpoint=CheckpointChoice(checkpoint=OLDER, reason="", lost_steps=31))
    assert standing_order(elsewhere, order, waiting=False, unfinished=True) == order
    assert outcome(verified(elsewhere, says(incident, 110))) is Outcome.VERIFIED
    assert standing_order(elsewhere, order, waiting=False, unfinished=False) is None
    unheard = incident.evolve(checkpoint=elsewhere.checkpoint)
    assert standing_order(unheard, order, waiting=False, unfinished=True) is None


def test_a_run_that_resumed_from_elsewhere_is_not_left_alone() -> None:
    incident, order = newly_ordered(chosen(), answers=(), now=NOW)
    wrong = heard(incident, says(incident, 100, OLDER), DetailType.RESUMED, now=NOW)
    assert standing_order(wrong, order, waiting=False, unfinished=True) is None
    assert resumed(stopped(wrong), "Relaunch", by="x", now=NOW).verification.problem
    assert outcome(resumed(stopped(wrong), "VerifyRecovery", by="x", now=NOW)) is None, "a person has seen to it"


def test_what_the_run_said_counts_until_a_state_stops_it() -> None:
    incident = ordered()
    proved = stopped(verified(incident, says(incident, 110)))
    for state in ("ChooseCheckpoint", "Relaunch", "VerifyRecovery", "CloseIncident"):
        assert outcome(resumed(proved, state, by="x", now=NOW)) is Outcome.VERIFIED
    for state in ("OpenIncident", "CordonNode", "StopTraining"):
        assert outcome(resumed(proved, state, by="x", now=NOW)) is None


def test_a_run_that_nothing_is_heard_of_is_not_waited_for_in_silence() -> None:
    incident = ordered()
    assert outcome(given_up(incident, waited_seconds=3599, limit_seconds=3600)) is None
    silent = given_up(incident, waited_seconds=3600, limit_seconds=3600)
    answer = verdict_on_recovery(silent)
    assert answer is not None
    assert answer[0] is Outcome.ESCALATE
    for part in ("within 3600 s", "go on from StopTraining", "go on from VerifyRecovery"):
        assert part in answer[1]
    assert len(answer[1]) <= 400, "a timeline's reason is cut there"
    heard_of = heard(incident, says(incident, 100), DetailType.RESUMED, now=NOW)
    assert given_up(heard_of, waited_seconds=86_400, limit_seconds=3600) == heard_of
    dry = incident.evolve(dry_run=True)
    assert given_up(dry, waited_seconds=86_400, limit_seconds=3600) == dry


# --- report


def test_costs_are_the_lost_steps_and_the_gpu_hours_until_the_resume() -> None:
    at = NOW + timedelta(hours=1, seconds=-2)
    incident = heard(ordered(), says(ordered(), 100), DetailType.RESUMED, now=at)
    assert costs(incident) == {"lost_steps": 21, "idle_seconds": 3600.0, "idle_gpu_hours": 4.0}
    assert costs(open_incident(an_alarm(), now=NOW, dry_run=False))["idle_gpu_hours"] is None
    assert "21 steps" in summary(incident)
    assert report(incident)["incident"]["incident_id"] == incident.incident_id


def test_a_dry_run_says_so_and_claims_no_costs() -> None:
    dry = chosen().evolve(dry_run=True, relaunch=Relaunch(at=iso(NOW)))
    assert "Dry run" in summary(dry)
    assert costs(dry)["idle_gpu_hours"] is None
