"""What is done on the word of an approval, and what is not: forged ones, those of others, those about other things."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lambdas.domain.incident import Incident
from lambdas.domain.records import (
    DecidedNode,
    HealthCheckStatus,
    Replacement,
)
from tests.adapters.cluster.incidents import Recovery, with_suspect
from tests.adapters.cluster.world import World


def test_nothing_is_replaced_without_an_approval(recovery: Recovery, world: World) -> None:
    incident = recovery.open(approved=False)
    recovery.run("resolve_node", incident.incident_id)
    assert recovery.run("replace_node", incident.incident_id)["outcome"] == "escalate"
    assert incident.suspects[0].node_name in {node["node_name"] for node in world.nodes()}


def forged_decision(incident: Incident, **changes: Any) -> Incident:
    """The incident with its decision changed as another function could write it into the table."""
    assert incident.approval is not None
    assert incident.approval.decision is not None
    decision = dataclasses.replace(incident.approval.decision, **changes)
    return incident.evolve(approval=dataclasses.replace(incident.approval, decision=decision))


FORGED: list[dict[str, Any]] = [
    {"mac": ""},
    {"mac": "AAAA"},
    {"mac": "A" * 43 + "="},
    {"mac": "no base64!"},
    {"decided_by": "arn:aws:iam::123456789012:user/root"},
    {"at": "2026-01-01T00:00:00.000Z"},
    {"comment": "seen it"},
    {"nodes": (DecidedNode(node_name="n", instance_id="i-0"),)},
]


def test_an_approval_that_decide_approval_did_not_make_replaces_nothing_and_a_genuine_one_does(
    recovery: Recovery,
) -> None:
    ident = recovery.open().incident_id
    recovery.run("resolve_node", ident)
    genuine = recovery.decide(ident)
    assert genuine.approval is not None
    for count, changes in enumerate(FORGED, start=1):
        recovery.store.save(forged_decision(recovery.load(ident), **changes))
        answer = recovery.run("replace_node", ident)
        assert (answer["outcome"], "was not made by the approval function" in answer["reason"]) == ("escalate", True)
        left = recovery.load(ident)
        assert left.approval is not None
        assert left.suspects[0].replacement is None
        assert (left.approval.decision, len(left.approval.set_aside)) == (None, count), "kept, and it does not count"
        restored = dataclasses.replace(left.approval, decision=genuine.approval.decision)
        recovery.store.save(left.evolve(approval=restored))
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    recovery.settle("await_replacement", ident)


def test_a_rejection_turned_into_an_approval_and_one_of_another_incident_do_not_count(recovery: Recovery) -> None:
    first, second = recovery.open(), recovery.open()
    for incident in (first, second):
        recovery.run("resolve_node", incident.incident_id)
    rejected = recovery.decide(first.incident_id, approve=False)
    recovery.store.save(forged_decision(rejected, approved=True))
    assert "was not made by" in recovery.run("replace_node", first.incident_id)["reason"]
    approved = recovery.decide(first.incident_id)
    copied = recovery.load(second.incident_id).evolve(approval=approved.approval, suspects=approved.suspects)
    recovery.store.save(copied)
    assert "was not made by" in recovery.run("replace_node", second.incident_id)["reason"]
    recovery.store.save(forged_decision(recovery.load(first.incident_id), approved=False))
    answer = recovery.run("release_node", first.incident_id)
    assert (answer["outcome"], "the rejection on record" in answer["reason"]) == ("escalate", True)
    assert recovery.store.quarantined(first.job.cluster_arn), "a node in quarantine is not given back on a forged no"


def test_an_approval_covers_the_instance_that_it_was_about_and_no_other(recovery: Recovery, world: World) -> None:
    """Neither a suspect that was resolved anew nor an intent that somebody wrote into the record is replaced."""
    incident = recovery.open()
    ident = incident.incident_id
    recovery.run("resolve_node", ident)
    victim = next(node for node in world.nodes() if node["node_name"] != incident.suspects[0].node_name)
    intent = Replacement(old_instance_id=victim["instance_id"], intended_at=incident.opened_at)
    changes: list[dict[str, Any]] = [
        {"instance_id": victim["instance_id"]},
        {"node_name": victim["node_name"]},
        {"replacement": intent},
        {"other_pods": ("team-b/neighbour",)},
    ]
    for change in changes:
        resolved = recovery.decide(ident).suspects
        recovery.store.save(with_suspect(recovery.load(ident), **change))
        answer = recovery.run("replace_node", ident)
        assert answer["outcome"] == "escalate"
        assert "did not cover" in answer["reason"]
        left = recovery.load(ident)
        assert not left.approved
        recovery.store.save(left.evolve(suspects=resolved))
    assert {victim["instance_id"]} <= {node["instance_id"] for node in world.nodes()}


def test_a_health_check_that_waits_for_the_approval_waits_for_a_genuine_one(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HyperPod may replace by itself what fails its check."""
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"health_check": "after_approval", "poll_seconds": 1}))
    ident = recovery.open().incident_id
    recovery.run("resolve_node", ident)
    genuine = recovery.decide(ident)
    recovery.store.save(forged_decision(genuine, mac=""))
    assert recovery.run("start_health_check", ident)["outcome"] == "deferred"
    answer = recovery.run("settle_health_check", ident)
    assert (answer["outcome"], "deferred" in answer["reason"]) == ("settled", True)
    recovery.store.save(recovery.load(ident).evolve(approval=genuine.approval))
    recovery.settle("settle_health_check", ident)
    check = recovery.load(ident).health_check
    assert check is not None
    assert check.status is HealthCheckStatus.PASSED
