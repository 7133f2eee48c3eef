"""The resume directive: what it orders, whom it bans, and when it is issued anew."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from lambdas.domain.cluster_relaunch import directive_for, newly_ordered, standing_order, withdrawn
from lambdas.domain.incident import Incident, open_incident
from lambdas.domain.records import Approval, CheckpointChoice, Decision
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import CheckpointRef, Step, directive_sha256

CHECKPOINT = CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32)
ALARMS = (an_alarm().alarm_id,)
FIRST, LATER = "2026-03-01T03:00:00.000Z", "2026-03-01T04:00:00.000Z"


def incident(*, approved: bool = True) -> Incident:
    decision = Decision(approved=approved, at=FIRST, decided_by="by link")
    return open_incident(an_alarm(), now=NOW, dry_run=False).evolve(
        checkpoint=CheckpointChoice(checkpoint=CHECKPOINT, reason="", lost_steps=21),
        approval=Approval(requested_at=FIRST, expires_at=LATER, decision=decision),
    )


def test_it_orders_the_chosen_checkpoint_and_nothing_newer() -> None:
    directive = directive_for(incident(), answers=ALARMS, issued_at=FIRST)
    assert (directive.checkpoint_uri, directive.manifest_sha256) == (CHECKPOINT.uri, CHECKPOINT.manifest_sha256)
    assert directive.max_step == 99
    assert directive.incident_id == incident().incident_id
    assert directive.answers_alarm_ids == ALARMS


def test_the_suspects_gpus_are_banned_after_an_approval_and_allowed_after_a_rejection() -> None:
    assert (
        directive_for(incident(), answers=ALARMS, issued_at=FIRST).banned_gpu_uuids == incident().suspects[0].gpu_uuids
    )
    assert directive_for(incident(approved=False), answers=ALARMS, issued_at=FIRST).banned_gpu_uuids == ()


def test_an_order_stands_while_it_is_waited_for_and_while_the_run_that_follows_it_runs() -> None:
    ordered, first = newly_ordered(incident(), answers=ALARMS, now=NOW)
    assert standing_order(ordered, first, waiting=True, unfinished=False) == first
    assert standing_order(ordered, first, waiting=True, unfinished=True) == first
    assert standing_order(ordered, first, waiting=False, unfinished=True) == first, "a healthy run is left alone"
    assert standing_order(ordered, first, waiting=False, unfinished=False) is None, "it may have left a tombstone"


def test_no_other_order_than_the_newest_of_the_incident_stands() -> None:
    ordered, first = newly_ordered(incident(), answers=ALARMS, now=NOW)
    again, second = newly_ordered(ordered, answers=ALARMS, now=NOW + timedelta(hours=1))
    other = dataclasses.replace(first, incident_id="inc-other")
    chosen = CheckpointRef(uri="s3://checkpoints/run-1/step-00000049", step=Step(49), manifest_sha256="cd" * 32)
    elsewhere = ordered.evolve(checkpoint=CheckpointChoice(checkpoint=chosen, reason="", lost_steps=71))
    for record, lies_there in (
        (incident(), first),
        (ordered, None),
        (ordered, other),
        (again, first),
        (elsewhere, first),
        (withdrawn(ordered, now=NOW + timedelta(hours=1)), first),
    ):
        assert standing_order(record, lies_there, waiting=True, unfinished=True) is None
    assert again.relaunch is not None
    assert again.relaunch.orders == (directive_sha256(first), directive_sha256(second))
    assert second.issued_at > first.issued_at


def test_an_alarm_that_joins_while_the_run_runs_makes_no_other_order_of_it() -> None:
    ordered, first = newly_ordered(incident(), answers=ALARMS, now=NOW)
    again, second = newly_ordered(ordered, answers=(*ALARMS, "joined"), now=NOW + timedelta(hours=1))
    assert standing_order(ordered, first, waiting=False, unfinished=True) == first
    assert standing_order(again, second, waiting=False, unfinished=True) == second


def test_what_was_never_ordered_is_not_withdrawn() -> None:
    assert withdrawn(incident(), now=NOW) == incident()


def test_without_a_chosen_checkpoint_there_is_no_order() -> None:
    with pytest.raises(ValueError, match="chosen checkpoint"):
        directive_for(incident().evolve(checkpoint=None), answers=ALARMS, issued_at=FIRST)
