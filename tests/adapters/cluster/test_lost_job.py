"""An incident whose relaunched job raised another alarm: it lets alone what the one that came of it works on."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from lambdas.domain.errors import JobLostError
from lambdas.domain.incident import open_incident
from lambdas.domain.records import CheckpointChoice
from lambdas.domain.workflow import abandoned, resumed
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import NAMESPACE, HyperPodPyTorchJob, World
from truestep.contract import AlarmId, CheckpointRef, Step

CHOICE = CheckpointChoice(
    checkpoint=CheckpointRef(uri="s3://b/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32),
    reason="newest trusted",
    lost_steps=21,
)


@pytest.mark.parametrize("closed", [False, True], ids=["while the later one works", "after the later one's end"])
def test_it_does_not_start_the_job_that_the_later_one_has_stopped(
    recovery: Recovery, world: World, closed: bool
) -> None:
    first = recovery.open()
    assert recovery.settle("stop_training", first.incident_id)["outcome"] == "stopped"
    recovery.store.save(recovery.load(first.incident_id).evolve(checkpoint=CHOICE))
    assert recovery.settle("relaunch_training", first.incident_id)["outcome"] == "relaunched"
    run = dataclasses.replace(first.alarm.run, attempt_id="attempt-2")
    alarm = dataclasses.replace(first.alarm, alarm_id=AlarmId("b" * 32), run=run)
    second = recovery.store.open(
        open_incident(alarm, now=datetime.now(UTC), dry_run=False, follows=first.incident_id),
        taking_over=first.incident_id,
    )
    assert recovery.settle("stop_training", second.incident_id)["outcome"] == "stopped"
    if closed:
        recovery.store.release_job(second)
    # The choice was recorded a moment before the later incident opened.
    ended = abandoned(
        recovery.load(first.incident_id), execution="arn:e", status="ABORTED", why="", now=datetime.now(UTC)
    )
    assert ended is not None
    recovery.store.save(resumed(ended, "StopTraining", by="by link", now=datetime.now(UTC)))
    directive = world.directive(first.job.name)
    for state in ("stop_training", "choose_checkpoint", "relaunch_training"):
        with pytest.raises(JobLostError, match=r"taken this job over.* go on from CloseIncident"):
            recovery.run(state, first.incident_id)
    job = world.admin.get(HyperPodPyTorchJob, first.job.name, namespace=NAMESPACE)
    assert job["spec"]["runPolicy"]["suspend"]
    assert world.directive(first.job.name) == directive
