"""The incident's record: identity, timeline, secrets, round trip."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from lambdas.domain.incident import TIMELINE_LIMIT, Incident, iso, open_incident, parse_iso
from lambdas.domain.outcome import Outcome, Result
from lambdas.domain.records import Approval, Escalation, Verification
from tests.unit.recovery.alarms import NOW, a_row, an_alarm
from truestep.contract import canonical_bytes


def an_incident() -> Incident:
    return open_incident(an_alarm(), now=NOW, dry_run=False)


def test_the_id_follows_from_the_alarm_so_that_a_retry_opens_the_same() -> None:
    assert an_incident().incident_id == an_incident().incident_id
    assert an_incident().incident_id != open_incident(an_alarm(step=121), now=NOW, dry_run=False).incident_id


def test_ranks_of_one_node_are_one_suspect_with_all_its_gpus() -> None:
    rows = (a_row(3), replace(a_row(2), node_name=a_row(3).node_name), a_row(1))
    first, second = open_incident(replace(an_alarm(), suspects=rows), now=NOW, dry_run=False).suspects
    assert (first.ranks, second.ranks) == ((1,), (2, 3))
    assert second.gpu_uuids == ("GPU-00000002", "GPU-00000003")


def test_the_record_comes_back_from_json() -> None:
    incident = an_incident().evolve(approval=Approval(requested_at=iso(NOW), expires_at=iso(NOW), task_token="s"))
    assert Incident.from_json(incident.to_json()) == incident


def test_no_task_token_is_in_the_public_record() -> None:
    incident = an_incident().evolve(
        approval=Approval(requested_at=iso(NOW), expires_at=iso(NOW), task_token="secret-1"),
        verification=Verification(task_token="secret-2"),
        escalation=Escalation(failed_state="X", error="", cause="", at=iso(NOW), task_token="secret-3"),
    )
    assert "secret" in str(incident.to_json())
    assert "secret" not in str(incident.to_public_json())


def test_repeated_polls_share_an_entry_and_count_the_wait_from_the_first() -> None:
    incident = an_incident()
    for minute in range(5):
        incident = incident.noted(
            at=NOW + timedelta(minutes=minute), state="StopTraining", outcome="pending", reason="2 pods left"
        )
    assert (len(incident.timeline), incident.timeline[-1].attempts) == (2, 5)
    assert incident.waited_seconds("StopTraining", NOW + timedelta(minutes=5)) == 300
    stopped = incident.noted(at=NOW, state="StopTraining", outcome="stopped", reason="no pods left")
    assert stopped.waited_seconds("StopTraining", NOW + timedelta(minutes=5)) == 0


def test_the_timeline_stays_bounded_and_keeps_its_opening() -> None:
    alarm = replace(an_alarm(), evidence={"tensors": "x" * 250_000})
    incident = open_incident(alarm, now=NOW, dry_run=False)
    for index in range(TIMELINE_LIMIT + 50):
        incident = incident.noted(at=NOW, state=f"State{index}", outcome="x", reason="y" * 5000)
    assert len(incident.timeline) == TIMELINE_LIMIT
    assert incident.timeline[0].state == "Intake"
    assert len(canonical_bytes(incident)) < 360_000


def test_times_are_utc_and_a_naive_one_is_refused() -> None:
    assert parse_iso(iso(NOW)) == NOW
    assert parse_iso("2026-03-01T03:30:00+01:00") == NOW
    with pytest.raises(ValueError, match="zone"):
        iso(datetime(2026, 3, 1))  # noqa: DTZ001 - the point of the test


def test_wait_seconds_go_with_pending_and_only_with_it() -> None:
    assert Result(incident_id="i", outcome=Outcome.PENDING, reason="r", wait_seconds=5).to_json()["wait_seconds"] == 5
    assert "wait_seconds" not in Result(incident_id="i", outcome=Outcome.STOPPED, reason="r").to_json()
    with pytest.raises(ValueError, match="pending"):
        Result(incident_id="i", outcome=Outcome.PENDING, reason="r")
    with pytest.raises(ValueError, match="pending"):
        Result(incident_id="i", outcome=Outcome.STOPPED, reason="r", wait_seconds=5)
