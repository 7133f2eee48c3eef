"""Training's own events on real services: checkpoints are kept; only the ordered, proven resume ends one."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lambdas.adapters.clock import SystemClock
from lambdas.domain.cluster_relaunch import newly_ordered
from lambdas.domain.errors import AlarmRefusedError, IncidentNotFoundError, SettingsError
from lambdas.domain.incident import Incident, iso
from lambdas.domain.records import CheckpointChoice
from lambdas.escalate.handler import handler as escalate
from lambdas.record_training_event.handler import handler as record_training_event
from lambdas.verify_recovery.handler import handler as verify_recovery
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import link_of, post, stop_event
from tests.unit.recovery.alarms import CLUSTER_ARN, a_row, an_alarm
from truestep.contract import CheckpointEvent, CheckpointRef, DetailType, ResumeEvent, Step, to_json, training_source
from truestep.protocols import ResumePoint
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter

CONTEXT: Any = None
OLDER = CheckpointRef(uri="s3://checkpoints/run-1/step-00000089", step=Step(89), manifest_sha256="ef" * 32)
ORDERED = CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32)
LATEST = CheckpointRef(uri="s3://checkpoints/run-1/step-00000119", step=Step(119), manifest_sha256="cd" * 32)


@pytest.fixture
def relaunched(cloud: Cloud, incident: Incident) -> Incident:
    return cloud.store.save(relaunching(incident))


def relaunching(incident: Incident) -> Incident:
    """The incident with a (new) order to resume."""
    choice = CheckpointChoice(checkpoint=ORDERED, reason="newest trusted", lost_steps=21)
    return newly_ordered(incident.evolve(checkpoint=choice), answers=(), now=SystemClock().now())[0]


def send(detail_type: DetailType, detail: Any, *, source: str = "") -> dict[str, Any]:
    document = to_json(detail)
    own = training_source(document["run"]["cluster_arn"], document["run"]["namespace"])
    return record_training_event(
        {"source": source or own, "detail-type": str(detail_type), "detail": document}, CONTEXT
    )


def a_resume(incident: Incident, ref: CheckpointRef = ORDERED, **run: Any) -> ResumeEvent:
    reference = an_alarm(**{"attempt_id": "attempt-2", **run}).run
    return ResumeEvent(
        run=reference,
        incident_id=incident.incident_id,
        directive_sha256=incident.relaunch.orders[-1] if incident.relaunch else "",
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


@pytest.mark.parametrize(("ref", "follows"), [(LATEST, False), (OLDER, True)], ids=["no order", "ordered one refused"])
def test_a_run_that_resumed_from_another_checkpoint_escalates_though_its_audits_pass(
    cloud: Cloud, relaunched: Incident, ref: CheckpointRef, follows: bool
) -> None:
    execution = wait(cloud, relaunched)
    event = a_resume(relaunched, ref)
    send(DetailType.VERIFIED, event if follows else dataclasses.replace(event, directive_sha256=""))
    output = cloud.output(execution)
    assert output is not None
    assert (output["outcome"], ORDERED.uri in output["reason"]) == ("escalate", True)


def test_a_restart_under_the_order_that_goes_on_from_its_own_progress_is_the_same_run(
    cloud: Cloud, relaunched: Incident
) -> None:
    execution = wait(cloud, relaunched)
    send(DetailType.RESUMED, a_resume(relaunched))
    again = a_resume(relaunched, LATEST, attempt_id="attempt-3")
    send(DetailType.RESUMED, again)
    assert cloud.still_waits(execution)
    send(DetailType.VERIFIED, again)
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "verified"


def test_late_word_of_the_run_before_does_not_prove_the_one_that_a_person_relaunched(
    cloud: Cloud, relaunched: Incident
) -> None:
    """Its outbox was behind, or a dead letter was sent again."""
    escalate(stop_event(relaunched, cloud.waiting_execution()[1], "VerifyRecovery"), CONTEXT)
    path, query = link_of(cloud.messages()[0])
    assert post(path, query, decision="resume", resume_from="StopTraining")["statusCode"] == 200
    send(DetailType.VERIFIED, a_resume(relaunched))
    second = cloud.store.save(relaunching(cloud.store.load(relaunched.incident_id)))
    execution = wait(cloud, second)
    assert not send(DetailType.VERIFIED, a_resume(relaunched))["completed"]
    assert cloud.still_waits(execution)
    assert send(DetailType.VERIFIED, a_resume(second, attempt_id="attempt-3"))["completed"]


def test_a_relaunched_run_that_nothing_is_heard_of_is_escalated_and_its_word_is_heard_all_the_same(
    cloud: Cloud, relaunched: Incident
) -> None:
    wait(cloud, relaunched)
    waiting = cloud.store.load(relaunched.incident_id)
    assert "VerifyRecovery" in waiting.waiting_since
    long_ago = iso(SystemClock().now() - timedelta(hours=1))
    cloud.store.save(waiting.evolve(waiting_since={"VerifyRecovery": long_ago}))
    execution = wait(cloud, relaunched)  # as the state's heartbeat enters it again
    output = cloud.output(execution)
    assert output is not None
    assert (output["outcome"], "no run has said" in output["reason"]) == ("escalate", True)
    send(DetailType.VERIFIED, a_resume(relaunched))
    escalate(stop_event(relaunched, cloud.waiting_execution()[1], "VerifyRecovery"), CONTEXT)
    path, query = link_of(cloud.messages()[0])
    assert post(path, query, decision="resume", resume_from="VerifyRecovery")["statusCode"] == 200
    output = cloud.output(wait(cloud, relaunched))
    assert output is not None
    assert output["outcome"] == "verified"


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


@pytest.mark.parametrize("ordered_by", ["by-hand-20261120T050000-0a1b2c", "inc-of-the-script", "nightly"])
def test_what_a_run_says_that_no_incident_ordered_is_taken_and_ends_nothing(
    cloud: Cloud, relaunched: Incident, tmp_path: Path, ordered_by: str
) -> None:
    """`truestep checkpoints start-from`, or a directive of the script's own: as the SDK reports such a start."""
    execution = wait(cloud, relaunched)
    reporter = EventReporter(a_row(0), an_alarm(attempt_id="attempt-2").run, Outbox(tmp_path), bus=None)
    point = ResumePoint(start_step=Step(100), checkpoint=ORDERED, incident_id=ordered_by, directive_sha256="4" * 64)
    reporter.resumed(point, ["n1"])
    reporter.verified(point, Step(110))
    source = training_source(CLUSTER_ARN, "team-a")
    for entry in reporter.outbox.pending():
        event = {"source": source, "detail-type": str(entry.detail_type), "detail": entry.detail}
        assert record_training_event(event, CONTEXT)["reason"] == "no incident ordered this resume"
    assert len(reporter.outbox.pending()) == 2
    assert cloud.still_waits(execution)
    assert cloud.store.load(relaunched.incident_id).verification.problem == ""
