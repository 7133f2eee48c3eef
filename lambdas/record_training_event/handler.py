"""Keeps what training says of its checkpoints, and lets an incident end when the resumed run has proved itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lambdas.adapters.aws import client
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.events import event_detail
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.retrying import save_changed
from lambdas.adapters.runtime import incident_store, log, normalised_errors, traced
from lambdas.domain.incident import Incident, IncidentStatus, iso, parse_iso
from lambdas.domain.intake import check_incident_id, check_run, check_source, check_time
from lambdas.domain.records import JobKey, TrainingAttempt
from lambdas.domain.verification import heard, verdict_on_recovery
from lambdas.ports import IncidentStore
from lambdas.settings import settings_from_environment
from truestep.contract import CheckpointEvent, DetailType, ResumeEvent, RunRef, from_json

_TRUST = {DetailType.CHECKPOINT_WRITTEN: "written", DetailType.CHECKPOINT_TRUSTED: "trusted"}


def record_training_event(event: dict[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001
    """Record one EventBridge event; repeating it changes nothing more. Raises `AlarmRefusedError` for a bad one."""
    with normalised_errors():
        settings = settings_from_environment("record_training_event")
        detail_type, detail = event_detail(event, *_TRUST, DetailType.RESUMED, DetailType.VERIFIED)
        run = from_json(RunRef, detail["run"], path="$.run")
        check_run(run)
        cluster = settings.cluster(run.cluster_arn)
        check_source(str(event.get("source")), run, cluster.training_namespaces)
        store = incident_store(settings)
        if detail.get("at"):
            check_time("at", str(detail["at"]))
            store.record_attempt(_job(run), _sign(run, str(detail["at"])))
        if detail_type in _TRUST:
            recorded = from_json(CheckpointEvent, detail)
            store.record_checkpoint(_job(run), recorded, _TRUST[detail_type])
            done = {"recorded": str(detail_type), "step": recorded.checkpoint.step}
        else:
            done = _resume(store, detail_type, detail)
        log("record_training_event", "event recorded", job=str(_job(run)), run_id=run.run_id, **done)
        return done


def _resume(store: IncidentStore, detail_type: DetailType, detail: Mapping[str, Any]) -> dict[str, Any]:
    resume = from_json(ResumeEvent, detail)
    if not resume.incident_id:
        return {"recorded": str(detail_type), "reason": "no incident ordered this resume"}
    check_incident_id(resume.incident_id)

    def change(incident: Incident) -> Incident | None:
        if incident.status is IncidentStatus.CLOSED or incident.job != _job(resume.run):
            return None
        return heard(incident, resume, detail_type, now=SystemClock().now())

    incident = save_changed(store, resume.incident_id, change)
    answer = verdict_on_recovery(incident)
    completed = False
    if answer is not None and incident.status is not IncidentStatus.CLOSED:
        output = {"incident_id": incident.incident_id, "outcome": str(answer[0]), "reason": answer[1]}
        completed = StepFunctions(client("stepfunctions")).complete(incident.verification.task_token, output)
    return {"recorded": str(detail_type), "incident_id": incident.incident_id, "completed": completed}


def _sign(run: RunRef, at: str) -> TrainingAttempt:
    """Never in the future: an event must not overtake alarms that are still to come."""
    now = SystemClock().now()
    return TrainingAttempt(attempt_id=run.attempt_id, heard_at=iso(now), seen_at=iso(min(now, parse_iso(at))))


def _job(run: RunRef) -> JobKey:
    return JobKey(cluster_arn=run.cluster_arn, namespace=run.namespace, kind=run.job_kind, name=run.job_name)


handler = traced("record_training_event", record_training_event)
