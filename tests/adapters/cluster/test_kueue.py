"""The confirmation where Kueue manages every Job: it waits in the training job's queue, and never for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Namespace
from lightkube.types import PatchType

from lambdas.adapters.kubernetes import BatchJob, Pod
from lambdas.domain.cluster_jobs import CONFIRMATION_LABEL, KUEUE_QUEUE_LABEL
from lambdas.domain.confirmation import STATE as CONFIRM
from lambdas.domain.incident import Incident
from lambdas.domain.records import ConfirmationStatus
from local_stack.cluster.kueue import MANAGED_LABEL
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import NAMESPACE, World, wait_until
from tests.unit.bundle.computation import ALARM, Witness
from truestep.contract import AlarmId

LocalQueue = create_namespaced_resource("kueue.x-k8s.io", "v1beta1", "LocalQueue", "localqueues")
QUEUE, PRIORITY = "team-a-queue", "kueue.x-k8s.io/priority-class"
QUEUED = {KUEUE_QUEUE_LABEL: QUEUE, PRIORITY: "training", "team": "a"}


def manage(world: World, value: str | None) -> None:
    patch = {"metadata": {"labels": {MANAGED_LABEL: value}}}
    world.admin.patch(Namespace, NAMESPACE, patch, patch_type=PatchType.MERGE)


@pytest.fixture
def managed(world: World) -> Iterator[None]:
    """Kueue manages every Job that is created in the namespace from now on."""
    manage(world, "true")
    yield
    manage(world, None)


@pytest.fixture
def recovery(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> Recovery:
    policy = {"poll_seconds": 1, "max_quarantined_nodes": 5, "max_quarantined_percent": 100, "health_check": "skip"}
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({**policy, "confirm_runs": 3}))
    return recovery


def stopped(recovery: Recovery, root: Path, labels: dict[str, str]) -> Incident:
    written = Witness().write(root)
    incident = recovery.open(alarm_id=AlarmId(ALARM), evidence=written, labels=labels)
    assert recovery.run("resolve_node", incident.incident_id)["outcome"] == "resolved"
    assert recovery.run("cordon_node", incident.incident_id)["outcome"] == "cordoned"
    assert recovery.settle("stop_training", incident.incident_id)["outcome"] == "stopped"
    return recovery.load(incident.incident_id)


def confirming(world: World, resource: Any, incident: Incident) -> list[Any]:
    labels = {CONFIRMATION_LABEL: incident.incident_id}
    return list(world.admin.list(resource, namespace=NAMESPACE, labels=labels))


def given_up(recovery: Recovery, incident: Incident) -> dict[str, Any]:
    """The state's answer once it has waited longer than it may."""
    waiting = recovery.load(incident.incident_id)
    recovery.store.save(waiting.evolve(waiting_since={CONFIRM: "2026-01-01T00:00:00.000Z"}))
    return recovery.run("confirm_suspect", incident.incident_id)


@pytest.mark.usefixtures("managed")
def test_its_jobs_wait_in_the_training_jobs_queue_and_run_once_admitted(
    recovery: Recovery, world: World, tmp_path: Path
) -> None:
    incident = stopped(recovery, tmp_path, QUEUED)
    assert recovery.run("confirm_suspect", incident.incident_id)["outcome"] == "pending"
    for job in confirming(world, BatchJob, incident):
        assert {name: job["metadata"]["labels"].get(name) for name in QUEUED} == {**QUEUED, "team": None}
        assert KUEUE_QUEUE_LABEL not in (job["spec"]["template"]["metadata"]["labels"])
    answer = recovery.settle("confirm_suspect", incident.incident_id, seconds=120)
    known = recovery.load(incident.incident_id).confirmation
    assert known is not None
    assert (answer["outcome"], known.status) == ("recorded", ConfirmationStatus.NOT_REPRODUCED), answer
    assert recovery.run("start_health_check", incident.incident_id)["outcome"] == "skipped"
    assert confirming(world, BatchJob, incident) == []


def test_a_job_that_is_never_admitted_is_given_up_in_bounded_time_and_deleted(
    recovery: Recovery, world: World, tmp_path: Path
) -> None:
    incident = stopped(recovery, tmp_path, QUEUED)
    spec = {"clusterQueue": "all", "stopPolicy": "Hold"}
    world.admin.create(LocalQueue({"metadata": {"name": QUEUE, "namespace": NAMESPACE}, "spec": spec}))
    try:
        assert recovery.run("confirm_suspect", incident.incident_id)["outcome"] == "pending"
        waiting = recovery.run("confirm_suspect", incident.incident_id)
        assert waiting["outcome"] == "pending"
        assert f"Kueue has not admitted its Job to queue {QUEUE}" in waiting["reason"]
        assert confirming(world, Pod, incident) == []
        answer = given_up(recovery, incident)
        assert answer["outcome"] == "skipped"
        assert f"not started within 300 s: Kueue has not admitted its Job to queue {QUEUE}" in answer["reason"]
        assert recovery.run("start_health_check", incident.incident_id)["outcome"] == "skipped"
        assert confirming(world, BatchJob, incident) == []
    finally:
        world.admin.delete(LocalQueue, QUEUE, namespace=NAMESPACE)


def test_without_a_queue_to_wait_in_it_is_given_up_with_the_reason(
    recovery: Recovery, world: World, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    incident = stopped(recovery, tmp_path, {})
    request.getfixturevalue("managed")
    assert recovery.run("confirm_suspect", incident.incident_id)["outcome"] == "pending"
    wait_until(lambda: len(confirming(world, BatchJob, incident)) == 2, "both Jobs")
    answer = given_up(recovery, incident)
    assert answer["outcome"] == "skipped"
    assert "as Kueue does where it manages jobs that name no queue" in answer["reason"]
    assert KUEUE_QUEUE_LABEL in answer["reason"]
    assert recovery.run("start_health_check", incident.incident_id)["outcome"] == "skipped"
    assert confirming(world, BatchJob, incident) == []
