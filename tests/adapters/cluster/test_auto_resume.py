"""HyperPod's auto-resume against a stop of ours: put off, waited out where it cannot be, and never past the order."""

from __future__ import annotations

from typing import Any

from lightkube.types import PatchType

from lambdas.domain.cluster_jobs import AUTO_RESUME, AUTO_RESUME_PUT_OFF
from local_stack.cluster.auto_resume import MOST
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.test_recovery_states import CHOICE
from tests.adapters.cluster.world import NAMESPACE, HyperPodPyTorchJob, World, wait_until


def job_of(world: World, name: str) -> dict[str, Any]:
    return dict(world.admin.get(HyperPodPyTorchJob, name, namespace=NAMESPACE))


def annotations(world: World, name: str) -> dict[str, str]:
    return job_of(world, name)["metadata"].get("annotations") or {}


def edit_job(world: World, name: str, patch: dict[str, Any]) -> None:
    world.admin.patch(HyperPodPyTorchJob, name, patch, namespace=NAMESPACE, patch_type=PatchType.MERGE)


def resumes(world: World, name: str) -> int:
    """How often the controller has let the job run again."""
    count: int = job_of(world, name)["status"].get("autoResumeCount", 0)
    return count


def test_it_is_put_off_while_the_job_is_stopped_and_the_resumed_job_has_it_again(
    recovery: Recovery, world: World
) -> None:
    incident = recovery.open(approved=False)
    ident, name = incident.incident_id, incident.job.name
    edit_job(world, name, {"metadata": {"annotations": {AUTO_RESUME: "true"}}})
    first = recovery.settle("stop_training", ident)
    assert (first["outcome"], resumes(world, name), world.pods(name)) == ("stopped", 0, [])
    looks = [entry.attempts for entry in recovery.load(ident).timeline if entry.outcome == "pending"]
    assert sum(looks) >= 1, "a job that may start again by itself is looked at twice"
    assert (annotations(world, name)[AUTO_RESUME], AUTO_RESUME_PUT_OFF in annotations(world, name)) == ("false", True)

    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    assert (annotations(world, name)[AUTO_RESUME], AUTO_RESUME_PUT_OFF in annotations(world, name)) == ("true", False)
    ordered = world.directive(name)
    # The controller does its work again, and what it starts finds the same order.
    edit_job(world, name, {"spec": {"runPolicy": {"suspend": True}}})
    wait_until(lambda: resumes(world, name) == 1 and world.running_pods(name, 2), "HyperPod to resume the job")
    assert world.directive(name) == ordered


def test_where_it_cannot_be_put_off_the_job_is_stopped_again_until_it_stays_so(
    recovery: Recovery, world: World
) -> None:
    incident = recovery.open()
    name = incident.job.name
    (replicas,) = job_of(world, name)["spec"]["replicaSpecs"]
    replicas["template"]["metadata"] = {"annotations": {AUTO_RESUME: "true", MOST: "3"}}
    edit_job(world, name, {"spec": {"replicaSpecs": [replicas]}})
    # Two looks in a row mean something only as far apart as the state machine makes them.
    stopping = recovery.settle("stop_training", incident.incident_id, seconds=60, poll_seconds=1)
    assert stopping["outcome"] == "stopped"
    assert (resumes(world, name), world.pods(name)) == (3, [])
    assert job_of(world, name)["spec"]["runPolicy"]["suspend"] is True
    assert recovery.load(incident.incident_id).found_stopped_at == ""


def test_pods_that_started_before_the_order_are_stopped_before_it_is_given(recovery: Recovery, world: World) -> None:
    """Somebody, or something, has let the stopped job run: its pods would never read the order."""
    incident = recovery.open(approved=False)
    ident, name = incident.incident_id, incident.job.name
    recovery.settle("stop_training", ident)
    edit_job(world, name, {"spec": {"runPolicy": {"suspend": False}}})
    early = wait_until(lambda: world.running_pods(name, 2), "the job to run behind the recovery's back")
    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    first = recovery.run("relaunch_training", ident)
    assert first["outcome"] == "pending"
    assert "started before the order to resume are stopped first" in first["reason"]
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    assert world.directive(name)["incident_id"] == ident
    now = wait_until(lambda: world.running_pods(name, 2), "the job to run with the order")
    assert not {pod["metadata"]["uid"] for pod in early} & {pod["metadata"]["uid"] for pod in now}
