"""The resume directive: what it orders, whom it bans, and when it is issued anew."""

from __future__ import annotations

import dataclasses

import pytest

from lambdas.domain.cluster_relaunch import directive_for
from lambdas.domain.incident import Incident, open_incident
from lambdas.domain.records import Approval, CheckpointChoice, Decision, Relaunch
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import CheckpointRef, Step

CHECKPOINT = CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32)
FIRST, LATER = "2026-03-01T03:00:00.000Z", "2026-03-01T04:00:00.000Z"


def incident(*, approved: bool = True) -> Incident:
    decision = Decision(approved=approved, at=FIRST, decided_by="by link")
    return open_incident(an_alarm(), now=NOW, dry_run=False).evolve(
        checkpoint=CheckpointChoice(checkpoint=CHECKPOINT, reason="", lost_steps=21),
        approval=Approval(requested_at=FIRST, expires_at=LATER, decision=decision),
    )


def test_it_orders_the_chosen_checkpoint_and_nothing_newer() -> None:
    directive = directive_for(incident(), None, issued_at=FIRST)
    assert (directive.checkpoint_uri, directive.manifest_sha256) == (CHECKPOINT.uri, CHECKPOINT.manifest_sha256)
    assert directive.max_step == 99
    assert directive.incident_id == incident().incident_id


def test_the_suspects_gpus_are_banned_after_an_approval_and_allowed_after_a_rejection() -> None:
    assert directive_for(incident(), None, issued_at=FIRST).banned_gpu_uuids == incident().suspects[0].gpu_uuids
    assert directive_for(incident(approved=False), None, issued_at=FIRST).banned_gpu_uuids == ()


def test_a_repeated_order_keeps_its_time() -> None:
    first = directive_for(incident(), None, issued_at=FIRST)
    assert directive_for(incident(), first, issued_at=LATER) == first


def test_another_incidents_order_is_replaced() -> None:
    other = dataclasses.replace(directive_for(incident(), None, issued_at=FIRST), incident_id="inc-other")
    assert directive_for(incident(), other, issued_at=LATER).issued_at == LATER


def test_a_second_relaunch_is_a_new_order() -> None:
    first = directive_for(incident(), None, issued_at=FIRST)
    again = incident().evolve(relaunch=Relaunch(at=FIRST))
    assert directive_for(again, first, issued_at=LATER).issued_at == LATER


def test_without_a_chosen_checkpoint_there_is_no_order() -> None:
    with pytest.raises(ValueError, match="chosen checkpoint"):
        directive_for(incident().evolve(checkpoint=None), None, issued_at=FIRST)
