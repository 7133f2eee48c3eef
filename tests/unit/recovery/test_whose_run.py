"""Which run an alarm is of: of one that the incident relaunched, of one that was overtaken, or of another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lambdas.domain.attempts import overtaken_by, with_sign
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.intake import IntakeAction, decide_intake, joined
from lambdas.domain.messages import joined_unheard
from lambdas.domain.records import Relaunch, TrainingAttempt
from tests.unit.recovery.alarms import NOW, an_alarm
from tests.unit.recovery.test_decisions import an_incident
from truestep.contract import Alarm

ORDERED = Relaunch(at="2026-03-01T04:00:00.000Z")
"""The incident's alarm was raised at 02:29:58."""


def an_alarm_of(attempt_id: str, at: str) -> Alarm:
    return replace(an_alarm(attempt_id=attempt_id), detected_at=f"2026-03-01T{at}:00Z")


def attempt(attempt_id: str, heard: str, seen: str = "") -> TrainingAttempt:
    return TrainingAttempt(
        attempt_id=attempt_id, heard_at=f"2026-03-01T{heard}:00.000Z", seen_at=f"2026-03-01T{seen or heard}:00.000Z"
    )


def relaunched(**changes: object) -> Incident:
    return an_incident().evolve(relaunch=replace(ORDERED, **changes))


def test_an_alarm_of_a_run_that_resumed_for_the_incident_is_a_follow_up_whatever_its_clock_says() -> None:
    for at in ("04:30", "03:58", "01:00"):
        decided = decide_intake(an_alarm_of("attempt-2", at), relaunched(attempts=("attempt-2",)))
        assert decided.action is IntakeAction.FOLLOW_UP


def test_so_is_one_of_a_run_that_was_first_heard_of_after_the_order() -> None:
    """Its Training Resumed is on its way still."""
    alarm = an_alarm_of("attempt-2", "03:58")
    assert decide_intake(alarm, relaunched(), (attempt("attempt-2", "04:01"),)).action is IntakeAction.FOLLOW_UP
    assert decide_intake(alarm, relaunched(), (attempt("attempt-2", "03:50"),)).action is IntakeAction.JOIN


def test_so_is_one_that_is_the_first_that_is_heard_of_its_run_unless_it_is_older_than_the_incident() -> None:
    assert decide_intake(an_alarm_of("attempt-2", "03:58"), relaunched()).action is IntakeAction.FOLLOW_UP
    assert decide_intake(an_alarm_of("attempt-0", "02:00"), relaunched()).action is IntakeAction.JOIN


def test_alarms_of_the_incidents_own_attempt_join_and_so_do_all_before_the_order() -> None:
    assert decide_intake(an_alarm_of("attempt-1", "04:30"), relaunched()).action is IntakeAction.JOIN
    assert decide_intake(an_alarm_of("attempt-2", "04:30"), an_incident()).action is IntakeAction.JOIN


def test_an_alarm_of_a_run_that_was_relaunched_twice_since_is_late() -> None:
    known = (attempt("attempt-2", "04:01"), attempt("attempt-3", "06:00", "06:30"))
    holder = relaunched(at="2026-03-01T05:50:00.000Z", attempts=("attempt-2", "attempt-3"))
    told = decide_intake(an_alarm_of("attempt-2", "05:00"), holder, known)
    assert (told.action, "attempt-3" in told.reason) == (IntakeAction.NOTIFY, True)


def test_an_alarm_that_the_job_has_trained_on_after_is_told_and_stops_nothing() -> None:
    alarm, closed = an_alarm(), an_incident().evolve(status=IncidentStatus.CLOSED)
    known = (attempt("attempt-1", "01:00"), attempt("attempt-2", "02:30", "02:45"))
    for holder in (None, closed):
        told = decide_intake(alarm, holder, known)
        assert (told.action, "attempt-2" in told.reason) == (IntakeAction.NOTIFY, True)
    assert decide_intake(alarm, an_incident(), known).action is IntakeAction.JOIN


@pytest.mark.parametrize(
    "known",
    [
        (),
        (attempt("attempt-1", "01:00"),),
        # Its node's clock is behind: the earlier attempt's last sign looks younger than this alarm.
        (attempt("attempt-0", "01:00", "02:35"), attempt("attempt-1", "02:31")),
        # The word of an earlier attempt was on its way for so long that the newest one was heard of before it.
        (attempt("attempt-1", "01:00"), attempt("attempt-0", "02:31", "00:30")),
        # The first that is heard of its attempt, by a clock that is behind.
        (attempt("attempt-0", "01:00", "02:35"),),
    ],
)
def test_an_alarm_of_the_newest_attempt_is_never_late(known: tuple[TrainingAttempt, ...]) -> None:
    assert overtaken_by(an_alarm(), known) is None
    assert decide_intake(an_alarm(), None, known).action is IntakeAction.OPEN


def test_an_attempt_keeps_its_place_and_its_newest_sign() -> None:
    known: tuple[TrainingAttempt, ...] = ()
    for sign in (attempt("a", "01:00"), attempt("b", "02:00"), attempt("a", "03:00"), attempt("a", "04:00", "00:30")):
        known = with_sign(known, sign)
    assert known == (attempt("a", "01:00", "03:00"), attempt("b", "02:00"))


def test_an_alarm_that_joins_is_noted_where_it_says_something_new() -> None:
    incident = an_incident()
    assert joined(incident, an_alarm(step=121), now=NOW) is None, "the same GPU of the same attempt"
    other_gpu = joined(incident, an_alarm(ranks=(1,), step=121), now=NOW)
    assert other_gpu is not None
    assert (
        "this attempt, attempt-1, accuses hyperpod-i-00000000000000001 (GPU-00000001)" in other_gpu.timeline[-1].reason
    )
    other_run = joined(other_gpu, an_alarm(attempt_id="attempt-2"), now=NOW)
    assert other_run is not None
    assert "another attempt, attempt-2, accuses hyperpod-i-00000000000000002" in other_run.timeline[-1].reason
    assert len(other_run.timeline) == len(incident.timeline) + 2
    for known in (an_alarm(ranks=(1,), step=130), an_alarm(attempt_id="attempt-2", step=131)):
        assert joined(other_run, known, now=NOW) is None


def test_a_storm_of_alarms_that_join_is_noted_a_bounded_number_of_times() -> None:
    incident = an_incident()
    for number in range(100):
        incident = joined(incident, an_alarm(attempt_id=f"attempt-{number + 2}"), now=NOW) or incident
    assert len(incident.timeline) == len(an_incident().timeline) + 16


def test_the_message_of_an_alarm_that_joins_says_what_to_do() -> None:
    incident = an_incident().evolve(status=IncidentStatus.ESCALATED)
    said = joined_unheard(incident, an_alarm(attempt_id="attempt-2", ranks=(3,)))
    assert incident.incident_id in said.subject
    for part in ("attempt attempt-2", "hyperpod-i-00000000000000003", "is escalated", "go on from CloseIncident"):
        assert part in said.text
