"""Intake: validate an alarm, keep it, and make sure that exactly one workflow takes care of its job."""

from __future__ import annotations

import functools
from typing import Any

from lambdas.adapters.aws import client
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.events import event_detail
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.intake import Intake
from lambdas.adapters.notifications import SnsNotifier
from lambdas.adapters.runtime import count, incident_store, log, normalised_errors, traced
from lambdas.domain.incident import job_of
from lambdas.domain.intake import check_alarm, check_run, check_source
from lambdas.settings import settings_from_environment
from truestep.contract import Alarm, DetailType


@functools.cache
def _taken(table: str) -> dict[str, str]:  # noqa: ARG001 - what it is kept for
    return {}


def receive_alarm(event: dict[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001 - Lambda's signature
    """Take in one EventBridge event. Safe to repeat at any point: the bus delivers at least once.

    Raises `AlarmRefusedError` or `ContractError` for an alarm that must not be acted on; after the bus's retries it
    lies in the dead-letter queue.
    """
    with normalised_errors():
        settings = settings_from_environment("receive_alarm")
        _, detail = event_detail(event, DetailType.ALARM)
        alarm = Alarm.from_json(detail)
        check_run(alarm.run)
        check_alarm(alarm)
        cluster = settings.cluster(alarm.run.cluster_arn)
        check_source(str(event.get("source")), alarm.run, cluster.training_namespaces)
        policy = settings.policy(alarm.run.cluster_arn)
        intake = Intake(
            store=incident_store(settings),
            executions=StepFunctions(client("stepfunctions"), settings.state_machine_arn),
            notifier=SnsNotifier(client("sns"), settings.topic_arn),
            clock=SystemClock(),
            taken=_taken(settings.table),
        )
        done = intake.take(alarm, policy)
        log("receive_alarm", "alarm taken in", job=str(job_of(alarm)), step=alarm.step, **done)
        count("receive_alarm", "Alarms", verdict=str(alarm.verdict.kind))
        return done


handler = traced("receive_alarm", receive_alarm)
