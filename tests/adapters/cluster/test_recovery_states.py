"""The cluster side's states against running pods, instances and nodes: what each does, also when it is repeated."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest

from lambdas.adapters.hyperpod import HyperPodCluster
from lambdas.domain.incident import iso
from lambdas.domain.records import (
    CheckpointChoice,
    Escalation,
    HealthCheckStatus,
    Replacement,
    TrainingAttempt,
)
from lambdas.domain.workflow import abandoned, resume_refused
from tests.adapters.cluster.incidents import Recovery, with_suspect
from tests.adapters.cluster.world import HYPERPOD_NAME, NAMESPACE, World, wait_until
from truestep.contract import CheckpointRef, Step, VerdictKind

CHOICE = CheckpointChoice(
    checkpoint=CheckpointRef(uri="s3://b/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32),
    reason="newest trusted",
    lost_steps=21,
)


def test_an_incident_goes_from_the_suspect_to_a_new_node_and_a_relaunched_job(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    ident, (suspect,) = incident.incident_id, incident.suspects
    assert recovery.run("resolve_node", ident)["outcome"] == "resolved"
    assert recovery.run("cordon_node", ident)["outcome"] == "cordoned"
    assert recovery.settle("stop_training", ident)["outcome"] == "stopped"
    assert world.pods(incident.job.name) == []
    assert recovery.run("start_health_check", ident)["outcome"] == "started"
    recovery.decide(ident)
    assert recovery.settle("settle_health_check", ident)["outcome"] == "settled"
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    assert recovery.settle("await_replacement", ident)["outcome"] == "ready"
    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"

    after = recovery.load(ident)
    check, (replaced,) = after.health_check, after.suspects
    assert check is not None
    assert check.status is HealthCheckStatus.PASSED
    assert replaced.replacement is not None
    new = replaced.replacement.new_instance_id
    assert new
    assert new != replaced.instance_id
    assert suspect.node_name not in {node["node_name"] for node in world.nodes()}
    assert after.relaunch is not None
    pods = world.pods(incident.job.name)
    assert len(pods) == 2
    assert suspect.node_name not in {pod["spec"]["nodeName"] for pod in pods}


def test_resolving_names_the_instance_and_claims_it_by_its_logical_id(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    answer = recovery.run("resolve_node", incident.incident_id)
    assert answer["outcome"] == "resolved"
    (suspect,) = recovery.load(incident.incident_id).suspects
    known = next(node for node in world.nodes() if node["node_name"] == suspect.node_name)
    assert (suspect.instance_id, suspect.logical_id) == (known["instance_id"], known["node_logical_id"])
    assert recovery.store.quarantined(incident.job.cluster_arn) == {suspect.logical_id}
    assert recovery.run("resolve_node", incident.incident_id)["outcome"] == "resolved"
    assert recovery.store.quarantined(incident.job.cluster_arn) == {suspect.logical_id}


def test_a_pod_that_was_restarted_since_the_alarm_is_asked_about(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    world.delete_job(incident.job.name)
    answer = recovery.run("resolve_node", incident.incident_id)
    assert answer["outcome"] == "ambiguous"
    assert "is gone" in answer["reason"]


def test_a_node_that_left_since_the_alarm_leads_straight_to_the_relaunch(recovery: Recovery, world: World) -> None:
    incident = recovery.open(approved=True)
    ident, name = incident.incident_id, incident.suspects[0].node_name
    instance = next(node["instance_id"] for node in world.nodes() if node["node_name"] == name)
    HyperPodCluster(boto3.client("sagemaker"), HYPERPOD_NAME).replace(instance)
    wait_until(lambda: name not in {node["node_name"] for node in world.nodes()}, "the old node leaves")
    assert recovery.run("resolve_node", ident)["outcome"] == "node_gone"
    assert recovery.run("cordon_node", ident)["outcome"] == "node_gone"
    assert recovery.run("start_health_check", ident)["outcome"] == "skipped"
    assert recovery.run("settle_health_check", ident)["outcome"] == "settled"
    assert recovery.run("replace_node", ident)["outcome"] == "node_gone"
    assert recovery.run("await_replacement", ident)["outcome"] == "ready"
    assert recovery.store.quarantined(incident.job.cluster_arn) == frozenset()


def test_an_ambiguous_verdict_is_not_resolved_into_certainty(recovery: Recovery) -> None:
    incident = recovery.open(kind=VerdictKind.AMBIGUOUS)
    assert recovery.run("resolve_node", incident.incident_id)["outcome"] == "ambiguous"


def test_a_node_held_by_another_incident_escalates(recovery: Recovery) -> None:
    incident = recovery.open()
    recovery.run("resolve_node", incident.incident_id)
    other = recovery.open()
    name = incident.suspects[0].node_name
    recovery.store.save(with_suspect(other, node_name=name))
    answer = recovery.run("resolve_node", other.incident_id)
    assert answer["outcome"] == "escalate"
    assert incident.incident_id in answer["reason"]


def test_the_breaker_stops_a_second_quarantine(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = recovery.open(), recovery.open()
    assert first.suspects[0].node_name != second.suspects[0].node_name
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"max_quarantined_nodes": 1}))
    assert recovery.run("resolve_node", first.incident_id)["outcome"] == "resolved"
    answer = recovery.run("resolve_node", second.incident_id)
    assert (answer["outcome"], "circuit breaker" in answer["reason"]) == ("escalate", True)
    ended = abandoned(
        recovery.load(second.incident_id), execution="arn:e", status="ABORTED", why="", now=datetime.now(UTC)
    )
    assert ended is not None
    assert "go on from ResolveNode" in resume_refused(ended, "CordonNode", holder=second.incident_id)


def test_stopping_twice_is_once_and_a_vanished_job_counts_as_stopped(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    first = recovery.run("stop_training", incident.incident_id)
    assert first["outcome"] in ("pending", "stopped")
    assert recovery.settle("stop_training", incident.incident_id)["outcome"] == "stopped"
    assert recovery.run("stop_training", incident.incident_id)["outcome"] == "stopped"
    world.delete_job(incident.job.name)
    assert recovery.run("stop_training", incident.incident_id)["outcome"] == "stopped"


def test_a_job_that_does_not_stop_in_time_escalates(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"stop_timeout_seconds": 1, "poll_seconds": 1}))
    incident = recovery.open(stubborn=True)
    waiting = incident.evolve(waiting_since={"StopTraining": "2026-01-01T00:00:00.000Z"})
    recovery.store.save(waiting)
    answer = recovery.run("stop_training", incident.incident_id)
    assert answer["outcome"] == "escalate"
    assert "StopTraining" in answer["reason"]


def test_a_job_kind_that_cannot_be_stopped_escalates_by_name(recovery: Recovery) -> None:
    incident = recovery.open()
    ray = dataclasses.replace(incident.job, kind="RayJob")
    recovery.store.open(incident.evolve(incident_id="inc-of-ray", job=ray))
    answer = recovery.run("stop_training", "inc-of-ray")
    assert answer["outcome"] == "escalate"
    assert "RayJob" in answer["reason"]


def test_a_replacement_is_asked_for_once_even_after_a_crash_before_the_answer_was_stored(
    recovery: Recovery, world: World
) -> None:
    incident = recovery.open()
    ident = incident.incident_id
    recovery.run("resolve_node", ident)
    recovery.decide(ident)
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    recovery.settle("await_replacement", ident)
    first = recovery.load(ident)
    replacement = first.suspects[0].replacement
    assert replacement is not None
    assert recovery.run("replace_node", ident)["outcome"] == "already_replaced"
    # The crash: the request had arrived, but neither its answer nor the new instance was stored.
    intent = Replacement(old_instance_id=replacement.old_instance_id, intended_at=replacement.intended_at)
    recovery.store.save(with_suspect(recovery.load(ident), replacement=intent))
    assert recovery.run("replace_node", ident)["outcome"] == "already_replaced"
    recovery.store.save(with_suspect(recovery.load(ident), replacement=intent, logical_id=""))
    assert recovery.run("replace_node", ident)["outcome"] == "already_replaced"
    assert replacement.new_instance_id in {node["instance_id"] for node in world.nodes()}


def test_pods_of_another_job_that_came_since_the_approval_need_a_new_one(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    ident = incident.incident_id
    recovery.run("resolve_node", ident)
    recovery.decide(ident)
    name = incident.suspects[0].node_name
    world.run_pod_on(name, "neighbour")
    answer = recovery.run("replace_node", ident)
    assert answer["outcome"] == "escalate"
    assert f"{NAMESPACE}/neighbour" in answer["reason"]
    assert recovery.load(ident).suspects[0].replacement is None
    assert not recovery.load(ident).approved
    assert recovery.run("replace_node", ident)["outcome"] == "escalate", "nobody has accepted the loss"
    recovery.decide(ident)
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    recovery.settle("await_replacement", ident)


def test_a_node_that_a_person_has_opened_is_replaced_only_if_a_person_insists(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    ident = incident.incident_id
    name = incident.suspects[0].node_name
    recovery.run("resolve_node", ident)
    recovery.run("cordon_node", ident)
    recovery.decide(ident)
    world.edit_node(name, {"spec": {"unschedulable": None}})
    answer = recovery.run("replace_node", ident)
    assert (answer["outcome"], "un-cordoned" in answer["reason"]) == ("escalate", True)
    assert recovery.load(ident).suspects[0].replacement is None
    stop = Escalation(failed_state="ReplaceNode", error="", cause="", at=incident.opened_at, resume_from="ReplaceNode")
    recovery.store.save(recovery.load(ident).evolve(escalation=stop))
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    recovery.settle("await_replacement", ident)


def test_a_node_that_was_opened_during_the_check_is_closed_and_asked_about(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    ident = incident.incident_id
    name = incident.suspects[0].node_name
    for function in ("resolve_node", "cordon_node", "start_health_check"):
        recovery.run(function, ident)
    recovery.decide(ident)
    world.edit_node(name, {"spec": {"unschedulable": None}})
    recovery.settle("settle_health_check", ident)
    assert world.node(name)["spec"]["unschedulable"] is True
    assert recovery.run("replace_node", ident)["outcome"] == "escalate"
    recovery.run("cordon_node", ident)
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    recovery.settle("await_replacement", ident)


def test_a_deferred_check_is_started_after_the_approval_and_its_failure_is_recorded(
    recovery: Recovery, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"health_check": "after_approval", "poll_seconds": 1}))
    incident = recovery.open()
    ident = incident.incident_id
    recovery.run("resolve_node", ident)
    recovery.run("cordon_node", ident)
    assert recovery.run("start_health_check", ident)["outcome"] == "deferred"
    recovery.settle("stop_training", ident)
    recovery.decide(ident)
    world.control("/local/health-check-outcomes", {"node_name": incident.suspects[0].node_name, "outcome": "failed"})
    answer = recovery.settle("settle_health_check", ident)
    assert answer["outcome"] == "settled"
    check = recovery.load(ident).health_check
    assert check is not None
    assert check.status is HealthCheckStatus.FAILED
    recovery.run("replace_node", ident)
    recovery.settle("await_replacement", ident)


def test_a_second_health_check_is_not_started_by_a_repeated_state(recovery: Recovery) -> None:
    incident = recovery.open()
    recovery.run("resolve_node", incident.incident_id)
    assert recovery.run("start_health_check", incident.incident_id)["outcome"] == "started"
    before = recovery.load(incident.incident_id).health_check
    assert recovery.run("start_health_check", incident.incident_id)["outcome"] == "started"
    assert recovery.load(incident.incident_id).health_check == before
    recovery.decide(incident.incident_id)
    assert recovery.settle("settle_health_check", incident.incident_id)["outcome"] == "settled"


def test_a_dry_run_goes_through_every_state_and_changes_nothing(recovery: Recovery, world: World) -> None:
    incident = recovery.open(dry_run=True)
    ident = incident.incident_id
    before = world.everything()
    outcomes: dict[str, Any] = {}
    for function in ("resolve_node", "cordon_node", "stop_training", "start_health_check", "settle_health_check"):
        outcomes[function] = recovery.run(function, ident)["outcome"]
    recovery.decide(ident)
    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    for function in ("replace_node", "await_replacement", "release_node", "relaunch_training"):
        outcomes[function] = recovery.run(function, ident)["outcome"]
    assert outcomes == {
        "resolve_node": "resolved",
        "cordon_node": "cordoned",
        "stop_training": "stopped",
        "start_health_check": "skipped",
        "settle_health_check": "settled",
        "replace_node": "requested",
        "await_replacement": "ready",
        "release_node": "left_alone",
        "relaunch_training": "relaunched",
    }
    assert world.everything() == before
    assert recovery.store.quarantined(incident.job.cluster_arn) == frozenset()


def test_a_run_that_somebody_has_started_anew_is_not_stopped_unless_a_person_insists(
    recovery: Recovery, world: World
) -> None:
    incident = recovery.open()
    at = iso(datetime.now(UTC) + timedelta(seconds=1))
    sign = TrainingAttempt(attempt_id="attempt-2", heard_at=at, seen_at=at)
    recovery.store.record_attempt(incident.job, sign)
    answer = recovery.run("stop_training", incident.incident_id)
    assert (answer["outcome"], "attempt-2 was training" in answer["reason"]) == ("escalate", True)
    assert all(not pod["metadata"].get("deletionTimestamp") for pod in world.pods(incident.job.name))
    assert len(world.pods(incident.job.name)) == 2
    stop = Escalation(failed_state="StopTraining", error="", cause="", at=sign.seen_at, resume_from="StopTraining")
    recovery.store.save(recovery.load(incident.incident_id).evolve(escalation=stop))
    assert recovery.settle("stop_training", incident.incident_id)["outcome"] == "stopped"
