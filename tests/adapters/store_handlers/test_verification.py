"""Training's own events on real services: checkpoints are kept; only the ordered, proven resume ends one."""

from __future__ import annotations

from typing import Any

import pytest

from lambdas.domain.errors import AlarmRefusedError, IncidentNotFoundError, SettingsError
from lambdas.domain.incident import Incident
from lambdas.domain.records import CheckpointChoice
from lambdas.record_training_event.handler import handler as record_training_event
from lambdas.verify_recovery.handler import handler as verify_recovery
from tests.adapters.store_handlers.conftest import Cloud
from tests.unit.recovery.alarms import CLUSTER_ARN, an_alarm
from truestep.contract import CheckpointEvent, CheckpointRef, DetailType, ResumeEvent, Step, to_json, training_source

CONTEXT: Any = None
ORDERED = CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32)
LATEST = CheckpointRef(uri="s3://checkpoints/run-1/step-00000119", step=Step(119), manifest_sha256="cd" * 32)


@pytest.fixture
def relaunched(cloud: Cloud, incident: Incident) -> Incident:
    choice = CheckpointChoice(checkpoint=ORDERED, reason="newest trusted", lost_steps=21)
    return cloud.store.save(incident.evolve(checkpoint=choice))


def send(detail_type: DetailType, detail: Any, *, source: str = "") -> dict[str, Any]:
    document = to_json(detail)
    own = training_source(document["run"]["cluster_arn"], document["run"]["namespace"])
    return record_training_event(
        {"source": source or own, "detail-type": str(detail_type), "detail": document}, CONTEXT
    )


def a_resume(incident: Incident, ref: CheckpointRef = ORDERED, **run: Any) -> ResumeEvent:
    reference = an_alarm(attempt_id="attempt-2", **run).run
    return ResumeEvent(
        run=reference,
        incident_id=incident.incident_id,
        checkpoint=ref,
        step=Step(110),
        nodes=("n1",),
        at="2026-03-01T04:00:00Z",
    )


def wait(cloud: Cloud, incident: Incident) -> str:
    execution, token = cloud.waiting_execution()
    verify_recovery({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    return execution


def test_resuming_is_not_yet_verified_and_the_first_passing_audit_is(cloud: Cloud, relaunched: Incident) -> None:
    execution = wait(cloud, relaunched)
    send(DetailType.RESUMED, a_resume(relaunched))
    assert cloud.still_waits(execution)
    assert send(DetailType.VERIFIED, a_resume(relaunched))["completed"]
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "verified"
    assert not send(DetailType.VERIFIED, a_resume(relaunched))["completed"]


def test_an_audit_that_passed_before_the_state_was_entered_counts(cloud: Cloud, relaunched: Incident) -> None:
    send(DetailType.VERIFIED, a_resume(relaunched))
    output = cloud.output(wait(cloud, relaunched))
    assert output is not None
    assert output["outcome"] == "verified"


def test_a_run_that_resumed_from_the_latest_checkpoint_escalates_though_its_audits_pass(
    cloud: Cloud, relaunched: Incident
) -> None:
    execution = wait(cloud, relaunched)
    send(DetailType.VERIFIED, a_resume(relaunched, LATEST))
    output = cloud.output(execution)
    assert output is not None
    assert (output["outcome"], ORDERED.uri in output["reason"]) == ("escalate", True)


def test_another_jobs_word_ends_nothing(cloud: Cloud, relaunched: Incident) -> None:
    execution = wait(cloud, relaunched)
    send(DetailType.VERIFIED, a_resume(relaunched, job_name="another"))
    with pytest.raises(SettingsError, match="cluster/x is not in TRUESTEP_CLUSTERS"):
        send(DetailType.VERIFIED, a_resume(relaunched, cluster_arn=f"{CLUSTER_ARN.rpartition('/')[0]}/x"))
    with pytest.raises(AlarmRefusedError, match="'team-b' is not among training_namespaces"):
        send(DetailType.VERIFIED, a_resume(relaunched, namespace="team-b"))
    with pytest.raises(AlarmRefusedError, match=r"only 'truestep\.training\.abcdefghijkl\.team-a' may"):
        send(DetailType.VERIFIED, a_resume(relaunched), source="truestep.training.abcdefghijkl.team-b")
    assert cloud.still_waits(execution)


def test_a_resume_without_an_incident_is_nobodys_and_an_unknown_incident_is_said(cloud: Cloud) -> None:
    event = a_resume(Incident.from_json({**_plain(), "incident_id": ""}))
    assert "no incident" in send(DetailType.RESUMED, event)["reason"]
    with pytest.raises(IncidentNotFoundError):
        send(DetailType.RESUMED, a_resume(Incident.from_json({**_plain(), "incident_id": "inc-ffffffffffffffff"})))


def _plain() -> dict[str, Any]:
    from lambdas.domain.incident import open_incident
    from tests.unit.recovery.alarms import NOW

    return open_incident(an_alarm(), now=NOW, dry_run=False).to_json()


def test_checkpoints_are_kept_with_their_trust(cloud: Cloud, relaunched: Incident) -> None:
    event = CheckpointEvent(run=an_alarm().run, checkpoint=ORDERED, weights_fingerprint="v1:00", clean_through=Step(99))
    send(DetailType.CHECKPOINT_TRUSTED, event)
    send(DetailType.CHECKPOINT_WRITTEN, event)
    (kept,) = cloud.store.checkpoints(relaunched.job)
    assert (kept.event, kept.trust) == (event, "trusted")
    broken = to_json(event) | {"checkpoint": {**to_json(ORDERED), "manifest_sha256": "zz"}}
    with pytest.raises(AlarmRefusedError, match="manifest_sha256"):
        send(DetailType.CHECKPOINT_WRITTEN, broken)
