"""A node that loses power in the middle of a recovery: its pods look as if they ran, and nobody there stops them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import pytest

from lambdas.adapters.hyperpod import HyperPodCluster
from lambdas.adapters.kubernetes import BatchJob, Pod
from lambdas.domain.cluster_jobs import CONFIRMATION_LABEL
from lambdas.domain.confirmation import STATE as CONFIRM
from lambdas.domain.incident import Incident
from lambdas.domain.records import ConfirmationStatus
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.test_recovery_states import CHOICE
from tests.adapters.cluster.world import HYPERPOD_NAME, NAMESPACE, HyperPodPyTorchJob, World, wait_until

NEVER = {"bundle_failed": "PeerFailedError: rank 1 is gone"}


@pytest.fixture(autouse=True)
def policy(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"poll_seconds": 1, "max_quarantined_nodes": 5, "max_quarantined_percent": 100, "health_check": "skip"}
    given |= {"stop_timeout_seconds": 1, "confirm_runs": 3, "confirm_timeout_seconds": 8}
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps(given))


def quarantined(recovery: Recovery, root: Path) -> Incident:
    evidence = {**NEVER, "bundle_expected": f"{root.as_uri()}/bundles/a"}
    incident = recovery.open(evidence=evidence, checkpoint_root=root.as_uri())
    assert recovery.run("resolve_node", incident.incident_id)["outcome"] == "resolved"
    assert recovery.run("cordon_node", incident.incident_id)["outcome"] == "cordoned"
    return recovery.load(incident.incident_id)


def lose_power(world: World, node_name: str) -> None:
    """The node is silent from now on."""
    world.control("/local/power-losses", {"node_name": node_name})


def exchange(world: World, node_name: str) -> None:
    """What a person, or HyperPod, does about an instance without power."""
    instance = next(node["instance_id"] for node in world.nodes() if node["node_name"] == node_name)
    HyperPodCluster(boto3.client("sagemaker"), HYPERPOD_NAME).replace(instance)
    wait_until(lambda: node_name not in {node["node_name"] for node in world.nodes()}, "the dark node leaves")


def quarantine_of(world: World, node_name: str) -> tuple[Any, list[str]]:
    spec = world.node(node_name)["spec"]
    return spec.get("unschedulable"), [taint["key"] for taint in spec.get("taints") or []]


@pytest.mark.parametrize("lost", ["suspect", "reporter"])
def test_power_lost_between_quarantine_and_stop_escalates_with_everything_safe_and_ends_recovered(
    recovery: Recovery, world: World, tmp_path: Path, lost: str
) -> None:
    incident = quarantined(recovery, tmp_path)
    ident, suspect = incident.incident_id, incident.suspects[0].node_name
    (other,) = {pod["spec"]["nodeName"] for pod in world.pods(incident.job.name)} - {suspect}
    dark = suspect if lost == "suspect" else other
    lose_power(world, dark)

    stopping = recovery.settle("stop_training", ident)
    assert stopping["outcome"] == "escalate", "a pod that nobody vouches for may be training still"
    assert "Delete what is stuck" in stopping["reason"]
    (left,) = world.pods(incident.job.name)
    assert (left["spec"]["nodeName"], left["status"]["phase"]) == (dark, "Running")
    assert left["metadata"]["name"] in stopping["reason"]
    closed, taints = quarantine_of(world, suspect)
    assert (closed, "truestep.ai/quarantine" in taints) == (True, True)
    job = world.admin.get(HyperPodPyTorchJob, incident.job.name, namespace=NAMESPACE)
    assert job["spec"]["runPolicy"]["suspend"] is True
    assert recovery.store.node_holder(incident.suspects[0].claim_key) == ident

    exchange(world, dark)
    assert recovery.settle("stop_training", ident)["outcome"] == "stopped"
    assert recovery.run("read_history", ident)["outcome"] == "read"
    confirmed = recovery.settle("confirm_suspect", ident, seconds=90)
    said = "has left the cluster" if lost == "suspect" else "the alarm went out without it: PeerFailedError"
    assert (confirmed["outcome"], said in confirmed["reason"]) == ("skipped", True), confirmed
    assert recovery.run("start_health_check", ident)["outcome"] == "skipped"
    recovery.decide(ident)
    assert recovery.settle("settle_health_check", ident)["outcome"] == "settled"
    asked = recovery.run("replace_node", ident)["outcome"]
    assert asked == ("already_replaced" if lost == "suspect" else "requested")
    assert recovery.settle("await_replacement", ident)["outcome"] == "ready"
    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    assert dark not in {pod["spec"]["nodeName"] for pod in world.pods(incident.job.name)}


def test_power_lost_while_the_confirmation_runs_ends_it_in_bounded_time_and_its_jobs_are_deleted(
    recovery: Recovery, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"poll_seconds": 1, "health_check": "skip"}))
    incident = quarantined(recovery, tmp_path)
    ident, suspect = incident.incident_id, incident.suspects[0].node_name
    assert recovery.settle("stop_training", ident)["outcome"] == "stopped"
    assert recovery.run("confirm_suspect", ident)["outcome"] == "pending"

    def pods() -> list[Any]:
        return list(world.admin.list(Pod, namespace=NAMESPACE, labels={CONFIRMATION_LABEL: ident}))

    def both_run() -> bool:
        return [(pod.get("status") or {}).get("phase") for pod in pods()] == ["Running"] * 2

    wait_until(both_run, "both of the confirmation's pods to run")
    lose_power(world, suspect)
    assert recovery.run("confirm_suspect", ident)["outcome"] == "pending"
    waiting = recovery.load(ident)
    # Its Job's deadline, and what is waited beyond it, are long over.
    recovery.store.save(waiting.evolve(waiting_since={CONFIRM: "2026-01-01T00:00:00.000Z"}))
    ended = recovery.run("confirm_suspect", ident)
    assert (ended["outcome"], "it had not ended after" in ended["reason"]) == ("skipped", True)
    known = recovery.load(ident).confirmation
    assert known is not None
    assert known.status is ConfirmationStatus.SKIPPED
    assert recovery.run("start_health_check", ident)["outcome"] == "skipped"
    assert list(world.admin.list(BatchJob, namespace=NAMESPACE, labels={CONFIRMATION_LABEL: ident})) == []
    assert quarantine_of(world, suspect)[0] is True
    exchange(world, suspect)
    wait_until(lambda: not pods(), "the confirmation's pods to go with the node")
