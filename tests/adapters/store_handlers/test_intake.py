"""Intake on real services: one incident a job, one execution an incident, and nothing on a bad alarm's word."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lambdas.adapters.clock import SystemClock
from lambdas.domain.errors import AlarmRefusedError, SettingsError
from lambdas.domain.incident import IncidentStatus, iso
from lambdas.domain.records import Relaunch
from lambdas.open_incident.handler import handler as open_incident_handler
from lambdas.receive_alarm.handler import handler as receive_alarm
from lambdas.record_training_event.handler import handler as record_training_event
from tests.adapters.store_handlers.conftest import Cloud
from tests.unit.recovery.alarms import an_alarm
from truestep.contract import Alarm, CheckpointEvent, ResumeEvent, Step, VerdictKind, to_json, training_source

CONTEXT: Any = None


def an_event(alarm: Alarm, *, source: str = "") -> dict[str, Any]:
    own = training_source(alarm.run.cluster_arn, alarm.run.namespace)
    return {"source": source or own, "detail-type": "Training Corruption Alarm", "detail": alarm.to_json()}


def executions(cloud: Cloud) -> list[str]:
    sfn = cloud.client("stepfunctions")
    return [run["name"] for run in sfn.list_executions(stateMachineArn=cloud.state_machine_arn)["executions"]]


def test_an_alarm_opens_an_incident_and_starts_its_workflow(cloud: Cloud) -> None:
    answer = receive_alarm(an_event(an_alarm()), CONTEXT)
    stored = cloud.store.load(answer["incident_id"])
    assert stored.alarm == an_alarm()
    assert executions(cloud) == [stored.incident_id]


def test_a_storm_of_alarms_of_one_job_is_one_incident(cloud: Cloud) -> None:
    answers = {receive_alarm(an_event(an_alarm(step=step)), CONTEXT)["incident_id"] for step in (120, 120, 121, 122)}
    assert len(answers) == 1
    assert executions(cloud) == list(answers)


def test_jobs_are_independent(cloud: Cloud) -> None:
    for name in ("pretrain", "finetune"):
        receive_alarm(an_event(an_alarm(job_name=name, run_id=f"run of {name}")), CONTEXT)
    assert len(executions(cloud)) == 2


def test_a_delivery_that_died_before_the_start_is_made_good_by_the_next(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setenv("TRUESTEP_STATE_MACHINE_ARN", cloud.state_machine_arn + "-missing")
        with pytest.raises(ClientError, match="StateMachine"):
            receive_alarm(an_event(an_alarm()), CONTEXT)
    assert executions(cloud) == []
    answer = receive_alarm(an_event(an_alarm()), CONTEXT)
    assert executions(cloud) == [answer["incident_id"]]


@pytest.mark.parametrize("kind", [VerdictKind.NUMERICS, VerdictKind.NONDETERMINISTIC, VerdictKind.INPUTS])
def test_a_verdict_that_accuses_nobody_is_announced_once_and_opens_nothing(cloud: Cloud, kind: VerdictKind) -> None:
    for _ in range(2):
        assert receive_alarm(an_event(an_alarm(kind=kind)), CONTEXT)["incident_id"] == "notified"
    (message,) = cloud.messages()
    assert "no hardware accused" in message["Subject"]
    assert executions(cloud) == []


def test_an_alarm_of_an_unknown_version_or_shape_is_refused(cloud: Cloud) -> None:
    event = an_event(an_alarm())
    with pytest.raises(AlarmRefusedError, match="schema_version"):
        receive_alarm({**event, "detail": {**event["detail"], "schema_version": 2}}, CONTEXT)
    with pytest.raises(AlarmRefusedError, match="alarm_id"):
        receive_alarm({**event, "detail": {**event["detail"], "alarm_id": "../x"}}, CONTEXT)
    with pytest.raises(AlarmRefusedError, match="detail-type"):
        receive_alarm({**event, "detail-type": "Something Else"}, CONTEXT)
    with pytest.raises(AlarmRefusedError, match="not for this function"):
        receive_alarm({**event, "detail-type": "Training Resumed"}, CONTEXT)
    assert executions(cloud) == []


@pytest.mark.parametrize("source", ["truestep.training", "truestep.training.abcdefghijkl.team-b"])
def test_an_alarm_whose_source_may_not_speak_for_its_job_is_refused_and_leaves_nothing(
    cloud: Cloud, source: str
) -> None:
    with pytest.raises(AlarmRefusedError, match=r"only 'truestep\.training\.abcdefghijkl\.team-a' may"):
        receive_alarm(an_event(an_alarm(), source=source), CONTEXT)
    assert executions(cloud) == []
    # What was refused is no repeat: the same alarm from its own pods is still heard.
    incident_id = receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"]
    assert executions(cloud) == [incident_id]


def test_an_alarm_of_a_namespace_that_is_not_served_is_refused_by_name(cloud: Cloud) -> None:
    with pytest.raises(AlarmRefusedError, match="'team-b' is not among training_namespaces"):
        receive_alarm(an_event(an_alarm(namespace="team-b")), CONTEXT)
    assert executions(cloud) == []


def test_an_alarm_of_a_cluster_that_is_not_served_or_of_no_job_is_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingsError, match="TRUESTEP_CLUSTERS"):
        receive_alarm(an_event(an_alarm(cluster_arn="arn:aws:sagemaker:us-east-1:123456789012:cluster/x")), CONTEXT)
    with pytest.raises(AlarmRefusedError, match="job_name"):
        receive_alarm(an_event(an_alarm(job_name="")), CONTEXT)


def test_an_alarm_whose_rows_point_out_of_its_jobs_namespace_is_refused(cloud: Cloud) -> None:
    event = an_event(an_alarm())
    row = event["detail"]["suspects"][0]
    for change, word in (({"namespace": "kube-system"}, "kube-system"), ({"node_name": "../../x"}, "node_name")):
        detail = {**event["detail"], "suspects": [{**row, **change}]}
        with pytest.raises(AlarmRefusedError, match=word):
            receive_alarm({**event, "detail": detail}, CONTEXT)
    assert executions(cloud) == []


def test_an_alarm_after_the_relaunch_is_a_new_incident_and_ends_the_old_ones_wait(cloud: Cloud) -> None:
    first = cloud.store.load(receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"])
    execution, token = cloud.waiting_execution()
    waiting = first.evolve(
        status=IncidentStatus.VERIFYING,
        relaunch=Relaunch(at="2026-03-01T03:00:00Z"),
        verification=first.verification.__class__(task_token=token),
    )
    cloud.store.save(waiting)
    late = an_alarm(attempt_id="attempt-1", step=119)
    assert receive_alarm(an_event(late), CONTEXT)["incident_id"] == first.incident_id
    again = Alarm.from_json({**an_alarm(attempt_id="attempt-2").to_json(), "detected_at": "2026-03-01T03:10:00Z"})
    second = cloud.store.load(receive_alarm(an_event(again), CONTEXT)["incident_id"])
    assert second.follows == first.incident_id
    output = cloud.output(execution)
    assert output is not None
    assert (output["outcome"], second.incident_id in output["reason"]) == ("escalate", True)


def test_an_alarm_from_the_outbox_does_not_stop_the_run_that_was_repaired_meanwhile(cloud: Cloud) -> None:
    checkpoint = an_alarm().checkpoint
    assert checkpoint is not None
    resumed = ResumeEvent(
        run=an_alarm(attempt_id="attempt-2").run,
        incident_id="",
        checkpoint=checkpoint,
        step=Step(100),
        at="2026-03-01T05:00:00+00:00",
    )
    sent = {"source": an_event(an_alarm())["source"], "detail-type": "Training Resumed", "detail": to_json(resumed)}
    record_training_event(sent, CONTEXT)
    for _ in range(2):
        assert receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"] == "notified"
    (message,) = cloud.messages()
    assert "hyperpod-i-00000000000000002" in message["Message"]
    assert "attempt-2 of this job was training at 2026-03-01T05:00:00.000Z" in message["Message"]
    assert executions(cloud) == []
    # The attempt that trains now is heard as ever.
    now = Alarm.from_json({**an_alarm(attempt_id="attempt-2").to_json(), "detected_at": "2026-03-01T04:59:00Z"})
    assert [receive_alarm(an_event(now), CONTEXT)["incident_id"]] == executions(cloud)


def test_an_event_from_the_future_does_not_silence_alarms_that_are_still_to_come(cloud: Cloud) -> None:
    checkpoint = an_alarm().checkpoint
    assert checkpoint is not None
    written = CheckpointEvent(
        run=an_alarm(attempt_id="x").run, checkpoint=checkpoint, weights_fingerprint="v1:0", at="2999-01-01T00:00:00Z"
    )
    source = an_event(an_alarm())["source"]
    sent = {"source": source, "detail-type": "Training Checkpoint Written", "detail": to_json(written)}
    record_training_event(sent, CONTEXT)
    late = Alarm.from_json({**an_alarm().to_json(), "detected_at": iso(SystemClock().now() + timedelta(seconds=1))})
    assert receive_alarm(an_event(late), CONTEXT)["incident_id"].startswith("inc-")


def test_open_incident_proceeds_and_writes_the_gpus_history(cloud: Cloud) -> None:
    incident_id = receive_alarm(an_event(an_alarm()), CONTEXT)["incident_id"]
    answer = open_incident_handler({"incident_id": incident_id}, CONTEXT)
    assert answer["outcome"] == "proceed"
    assert [past.incident_id for past in cloud.store.gpu_history("GPU-00000002")] == [incident_id]
    stored = cloud.store.load(incident_id)
    assert stored.status is IncidentStatus.INVESTIGATING
    assert stored.timeline[-1].outcome == "proceed"


def test_open_incident_stops_where_the_verdict_names_no_candidate(cloud: Cloud) -> None:
    alarm = an_alarm(kind=VerdictKind.AMBIGUOUS, ranks=())
    incident_id = receive_alarm(an_event(alarm), CONTEXT)["incident_id"]
    answer = open_incident_handler({"incident_id": incident_id}, CONTEXT)
    assert answer["outcome"] == "escalate"
    assert "no candidate" in answer["reason"]


def test_an_incident_that_is_closed_is_not_taken_up_again(cloud: Cloud) -> None:
    """Whoever starts its workflow anew, or delivers its alarm again: nothing is done."""
    event = an_event(an_alarm())
    ident = receive_alarm(event, CONTEXT)["incident_id"]
    closed = cloud.store.save(cloud.store.load(ident).evolve(status=IncidentStatus.CLOSED))
    assert open_incident_handler({"incident_id": ident}, CONTEXT)["outcome"] == "closed"
    receive_alarm(event, CONTEXT)
    assert executions(cloud) == [ident]
    assert cloud.store.load(ident).timeline[:1] == closed.timeline[:1]
    assert cloud.messages() == []
