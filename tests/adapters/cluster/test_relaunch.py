"""Relaunch against running pods: whose order they follow, whom it stops, what counts as started."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest
from lightkube.types import PatchType

from lambdas.domain.incident import iso
from lambdas.domain.records import Escalation
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.test_recovery_states import CHOICE
from tests.adapters.cluster.world import NAMESPACE, HyperPodPyTorchJob, World, wait_until


def stopped(recovery: Recovery) -> tuple[str, str]:
    """Id and job of an incident that has stopped its job and chosen a checkpoint."""
    incident = recovery.open()
    assert recovery.settle("stop_training", incident.incident_id)["outcome"] == "stopped"
    recovery.store.save(recovery.load(incident.incident_id).evolve(checkpoint=CHOICE))
    return incident.incident_id, incident.job.name


def insist(recovery: Recovery, ident: str, *, at: str = "") -> None:
    """A person goes on from StopTraining."""
    at = at or iso(datetime.now(UTC))
    stop = Escalation(failed_state="VerifyRecovery", error="", cause="", at=at, resume_from="StopTraining")
    recovery.store.save(recovery.load(ident).evolve(escalation=stop))


def uids(world: World, job: str) -> list[str]:
    return sorted(pod["metadata"]["uid"] for pod in world.pods(job) if not pod["metadata"].get("deletionTimestamp"))


def test_a_relaunch_orders_the_checkpoint_before_the_job_runs_again(recovery: Recovery, world: World) -> None:
    incident = recovery.open(approved=False)
    ident = incident.incident_id
    joined = dataclasses.replace(incident.alarm, alarm_id="joined")
    recovery.store.record_alarm(joined, datetime.now(UTC))
    recovery.store.assign_alarm(joined, ident)
    recovery.settle("stop_training", ident)
    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    directive = world.directive(incident.job.name)
    assert directive["checkpoint_uri"] == CHOICE.checkpoint.uri
    assert directive["max_step"] == 99
    assert directive["incident_id"] == ident
    assert directive["answers_alarm_ids"] == sorted((incident.alarm.alarm_id, "joined"))
    assert directive["banned_gpu_uuids"] == [], "after a rejection the GPU may be used again"
    wait_until(lambda: world.running_pods(incident.job.name, 2), "the job runs again")


def test_a_relaunch_whose_pods_no_node_takes_is_waited_for_within_bounds(recovery: Recovery, world: World) -> None:
    incident = recovery.open(approved=False)
    ident = incident.incident_id
    recovery.settle("stop_training", ident)
    wait_until(lambda: not world.pods(incident.job.name), "the pods to be gone")
    for node in world.nodes():
        world.edit_node(node["node_name"], {"spec": {"unschedulable": True}})
    recovery.store.save(recovery.load(ident).evolve(checkpoint=CHOICE))
    assert recovery.run("relaunch_training", ident)["outcome"] == "pending"
    waited = recovery.load(ident).evolve(waiting_since={"Relaunch": "2026-01-01T00:00:00.000Z"})
    recovery.store.save(waited)
    answer = recovery.run("relaunch_training", ident)
    assert (answer["outcome"], "not running yet" in answer["reason"]) == ("escalate", True)


def test_a_relaunch_of_a_job_that_was_deleted_says_to_recreate_it(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    recovery.store.save(recovery.load(incident.incident_id).evolve(checkpoint=CHOICE))
    world.delete_job(incident.job.name)
    answer = recovery.run("relaunch_training", incident.incident_id)
    assert answer["outcome"] == "escalate"
    assert "re-create it" in answer["reason"]
    assert world.directive(incident.job.name)["max_step"] == 99


def test_a_second_relaunch_of_an_incident_is_a_new_order_and_starts_the_job(recovery: Recovery, world: World) -> None:
    """Nothing came of the first run; a person went on from StopTraining."""
    ident, job = stopped(recovery)
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    first = world.directive(job)
    insist(recovery, ident)
    assert recovery.settle("stop_training", ident)["outcome"] == "stopped"
    looks: list[Any] = [recovery.run("relaunch_training", ident)]
    second = world.directive(job)
    assert second["issued_at"] > first["issued_at"], "the first was followed: it may be what a tombstone came after"
    looks.append(recovery.settle("relaunch_training", ident))
    assert looks[-1]["outcome"] == "relaunched", looks
    assert world.directive(job) == second, "looks do not order anew"
    after = recovery.load(ident).relaunch
    assert after is not None
    assert (after.at, len(after.orders)) == (second["issued_at"], 2)


def test_a_run_that_follows_the_order_is_left_alone_when_relaunch_is_entered_again(
    recovery: Recovery, world: World
) -> None:
    """The execution was stopped after Relaunch had answered, or before its answer was stored."""
    ident, job = stopped(recovery)
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    before, order = uids(world, job), world.directive(job)
    assert recovery.run("relaunch_training", ident)["outcome"] == "relaunched"
    assert (uids(world, job), world.directive(job)) == (before, order)
    assert not world.admin.get(HyperPodPyTorchJob, job, namespace=NAMESPACE)["spec"]["runPolicy"]["suspend"]


def test_the_order_is_on_record_before_the_job_is_let_run(
    recovery: Recovery, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ident, job = stopped(recovery)

    def killed(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lambdas.adapters.kubernetes.Kubernetes.unsuspend", killed)
        with pytest.raises(KeyboardInterrupt):
            recovery.run("relaunch_training", ident)
    ordered = recovery.load(ident).relaunch
    assert ordered is not None
    assert ordered.at == world.directive(job)["issued_at"]
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    assert recovery.load(ident).relaunch == ordered, "pods that were coming meanwhile follow this order"


def test_a_job_whose_pods_all_fail_has_not_started(
    recovery: Recovery, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an image that refuses to start: a banned GPU, a tombstone that the order does not answer."""
    ident, job = stopped(recovery)
    container = {"name": "training", "image": "training", "command": ["python", "-c", "raise SystemExit('refused')"]}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    patch = {"spec": {"replicaSpecs": [{"name": "worker", "replicas": 2, "template": template}]}}
    world.admin.patch(HyperPodPyTorchJob, job, patch, namespace=NAMESPACE, patch_type=PatchType.MERGE)
    assert recovery.run("relaunch_training", ident)["outcome"] == "pending"
    wait_until(lambda: "Failed" in {pod["status"].get("phase") for pod in world.pods(job)}, "a pod of the job fails")
    answer = recovery.run("relaunch_training", ident)
    assert (answer["outcome"], "failed: " in answer["reason"]) == ("pending", True), answer
    recovery.store.save(recovery.load(ident).evolve(waiting_since={"Relaunch": "2026-01-01T00:00:00.000Z"}))
    answer = recovery.run("relaunch_training", ident)
    assert answer["outcome"] == "escalate"
    assert "look at the log of pods that failed" in answer["reason"]


def test_a_start_by_hand_asks_before_it_stops_the_run_that_the_incident_has_relaunched(
    recovery: Recovery, world: World
) -> None:
    """Nothing was heard of the run, which trains well; {"incident_id"} alone leads through every state again."""
    ident, job = stopped(recovery)
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    running = uids(world, job)
    asked = recovery.run("stop_training", ident)
    assert asked["outcome"] == "escalate"
    assert "has let the job run again" in asked["reason"]
    assert "VerifyRecovery" in asked["reason"]
    assert uids(world, job) == running
    # A choice of before the relaunch does not speak of this run; one of since then does.
    for at, outcome in (("2026-01-01T00:00:00.000Z", "escalate"), ("", "stopped")):
        insist(recovery, ident, at=at)
        assert recovery.settle("stop_training", ident)["outcome"] == outcome
    assert uids(world, job) == []


def test_a_relaunched_run_that_has_ended_is_stopped_without_a_question(recovery: Recovery, world: World) -> None:
    ident, job = stopped(recovery)
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"
    stop = {"spec": {"runPolicy": {"suspend": True}}}
    world.admin.patch(HyperPodPyTorchJob, job, stop, namespace=NAMESPACE, patch_type=PatchType.MERGE)
    wait_until(lambda: not world.pods(job), "the pods to be gone")
    assert recovery.settle("stop_training", ident)["outcome"] == "stopped"
