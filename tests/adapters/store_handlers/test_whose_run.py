"""Alarms of other runs of a job on real services: none is swallowed, and none of the newest run is taken for late."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta

import pytest

from lambdas.adapters.clock import SystemClock
from lambdas.domain.incident import IncidentStatus, iso, job_of, parse_iso
from lambdas.domain.records import Relaunch, TrainingAttempt
from lambdas.escalate.handler import handler as escalate
from lambdas.receive_alarm.handler import handler as receive_alarm
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, stop_event
from tests.adapters.store_handlers.test_intake import an_event, executions
from tests.adapters.store_handlers.test_verification import ORDERED, a_resume, relaunching, send
from tests.unit.recovery.alarms import an_alarm
from truestep.contract import Alarm, CheckpointEvent, DetailType


def ago(seconds: float) -> datetime:
    return SystemClock().now() - timedelta(seconds=seconds)


def raised(alarm: Alarm, at: datetime) -> Alarm:
    return dataclasses.replace(alarm, detected_at=iso(at))


def trains(attempt_id: str, at: datetime) -> None:
    """A sign of training, by the word of the trainer's clock."""
    run = an_alarm(attempt_id=attempt_id).run
    written = CheckpointEvent(run=run, checkpoint=ORDERED, weights_fingerprint="v1:00", at=iso(at))
    send(DetailType.CHECKPOINT_WRITTEN, written)


@pytest.mark.parametrize("heard", [True, False], ids=["heard of before", "its first word"])
def test_an_alarm_of_the_newest_attempt_opens_an_incident_though_its_nodes_clock_is_behind(
    cloud: Cloud, heard: bool
) -> None:
    """Attempt 1 trained until two minutes ago; attempt 2 runs on a node that is five minutes behind."""
    earlier = TrainingAttempt(attempt_id="attempt-1", heard_at=iso(ago(7200)), seen_at=iso(ago(120)))
    cloud.store.record_attempt(job_of(an_alarm()), earlier)
    if heard:
        trains("attempt-2", ago(330))
    alarm = raised(an_alarm(attempt_id="attempt-2"), ago(300))
    assert [receive_alarm(an_event(alarm), CONTEXT)["incident_id"]] == executions(cloud)
    assert [attempt.attempt_id for attempt in cloud.store.attempts(job_of(an_alarm()))] == ["attempt-1", "attempt-2"]


def test_an_alarm_of_a_relaunched_run_whose_nodes_clock_is_behind_is_an_incident_of_its_own(cloud: Cloud) -> None:
    first = cloud.store.load(receive_alarm(an_event(raised(an_alarm(), ago(900))), CONTEXT)["incident_id"])
    cloud.store.save(first.evolve(status=IncidentStatus.RECOVERING, relaunch=Relaunch(at=iso(ago(60)))))
    trains("attempt-2", ago(150))
    alarm = raised(an_alarm(attempt_id="attempt-2", step=130, ranks=(3,)), ago(120))
    second = cloud.store.load(receive_alarm(an_event(alarm), CONTEXT)["incident_id"])
    assert second.follows == first.incident_id
    assert sorted(executions(cloud)) == sorted([first.incident_id, second.incident_id])


def test_an_alarm_of_a_run_that_said_that_it_resumed_for_the_incident_opens_one_of_its_own(cloud: Cloud) -> None:
    """Between two looks of Relaunch, which are minutes apart: the first has let the job run and answered pending."""
    first = cloud.store.load(receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"])
    ordered = relaunching(first.evolve(status=IncidentStatus.RECOVERING))
    cloud.store.save(ordered.noted(at=ago(20), state="Relaunch", outcome="pending", reason="of 4 pods, 4 not running"))
    send(DetailType.RESUMED, a_resume(ordered))
    # By a clock that is behind by more than the whole recovery took.
    alarm = raised(an_alarm(attempt_id="attempt-2", step=130, ranks=(3,)), parse_iso(first.alarm.detected_at))
    second = cloud.store.load(receive_alarm(an_event(alarm), CONTEXT)["incident_id"])
    assert second.follows == first.incident_id
    assert second.incident_id in cloud.store.load(first.incident_id).verification.problem


def test_an_alarm_of_a_run_that_was_repaired_by_hand_is_told_and_noted_once(cloud: Cloud) -> None:
    """The incident stays escalated: nobody said that it was settled."""
    first = receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"]
    escalate(stop_event(cloud.store.load(first), cloud.waiting_execution()[1], "StopTraining"), CONTEXT)
    cloud.messages()
    trains("attempt-2", ago(3600))
    for step in (990, 991):
        alarm = raised(an_alarm(attempt_id="attempt-2", step=step, ranks=(3,)), ago(1))
        assert receive_alarm(an_event(alarm), CONTEXT)["incident_id"] == first
    (message,) = cloud.messages()
    assert message["Subject"].startswith("An alarm of another run joined an open incident")
    assert "go on from CloseIncident" in message["Message"]
    noted = [entry for entry in cloud.store.load(first).timeline if entry.outcome.startswith("joined by alarm")]
    assert len(noted) == 1
    assert "another attempt, attempt-2" in noted[0].reason


def test_a_second_accusation_of_the_same_run_is_noted_and_not_told(cloud: Cloud) -> None:
    first = receive_alarm(an_event(an_alarm(ranks=(2,))), CONTEXT)["incident_id"]
    assert receive_alarm(an_event(an_alarm(ranks=(1,), step=121)), CONTEXT)["incident_id"] == first
    assert "hyperpod-i-00000000000000001" in cloud.store.load(first).timeline[-1].reason
    assert cloud.messages() == []
