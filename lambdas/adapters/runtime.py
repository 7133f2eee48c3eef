"""What every function of the workflow shares: settings, loading, the timeline, logs and metrics around a decision.

A state's function is ``act(work) -> Answer``: it may be entered twice, so it looks before it acts. Its changes to the
incident are saved together with the timeline entry; if the incident has changed meanwhile nothing is saved and the
state is retried.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from aws_lambda_powertools.logging import Logger
from aws_lambda_powertools.metrics import EphemeralMetrics, MetricUnit
from aws_lambda_powertools.tracing import Tracer

from lambdas.adapters.aws import client, transient_errors
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.store import DynamoIncidentStore
from lambdas.domain.errors import DrivenElsewhereError, JobLostError, TransientError
from lambdas.domain.incident import Incident
from lambdas.domain.outcome import Outcome, Result
from lambdas.domain.policy import Policy
from lambdas.domain.workflow import answered, job_lost, may_drive
from lambdas.ports import Clock, IncidentStore
from lambdas.settings import Settings, settings_from_environment

Handler: TypeAlias = Callable[[dict[str, Any], Any], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a state's function is given."""

    incident: Incident
    settings: Settings
    policy: Policy
    store: IncidentStore
    clock: Clock
    now: datetime
    task_token: str = ""
    """Secret; only in token states."""
    event: Mapping[str, Any] = field(default_factory=dict)

    def answer(self, outcome: Outcome, reason: str, *, incident: Incident | None = None) -> Answer:
        """The answer with this outcome, and the incident as changed, if it was."""
        return Answer(incident=incident or self.incident, outcome=outcome, reason=reason)

    def pending(self, state: str, reason: str, *, incident: Incident | None = None) -> Answer:
        """Ask to be called again, later the longer the state has waited already."""
        waited = self.incident.waited_seconds(state, self.now)
        return Answer(
            incident=incident or self.incident,
            outcome=Outcome.PENDING,
            reason=reason,
            wait_seconds=self.policy.poll_after(waited),
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a state's function concluded: the incident as it is to be stored, and the word for the Choice."""

    incident: Incident
    outcome: Outcome
    reason: str
    wait_seconds: int | None = None


Act: TypeAlias = Callable[[Work], Answer]
DrivenBy: TypeAlias = Callable[[Incident, str, Settings], str]
"""Which other execution drives the incident, so that the one of this ARN must not; empty where it may."""


@dataclass(frozen=True)
class Observability:
    """One function's logger, metrics and tracer."""

    logger: Logger
    metrics: EphemeralMetrics
    tracer: Tracer


@functools.cache
def observability(function: str) -> Observability:
    """The function's logger, metrics and tracer, made at the first call: nothing reads the environment at import."""
    service = os.environ.get("POWERTOOLS_SERVICE_NAME", "truestep")
    namespace = os.environ.get("POWERTOOLS_METRICS_NAMESPACE", "truestep")
    # Ephemeral: Metrics shares its dimensions between all instances of a process.
    return Observability(
        Logger(service=service, child=False, name=function),
        EphemeralMetrics(namespace=namespace, service=service),
        Tracer(service=service),
    )


def count(function: str, name: str, **dimensions: str) -> None:
    """Count one event in CloudWatch, as one line of embedded metric format."""
    metrics = observability(function).metrics
    for dimension, value in {"function": function, **dimensions}.items():
        metrics.add_dimension(name=dimension, value=value)
    metrics.add_metric(name=name, unit=MetricUnit.Count, value=1)
    metrics.flush_metrics()


def log(function: str, message: str, **fields: object) -> None:
    """Write one JSON line. Never pass a task token or a link's query."""
    observability(function).logger.info(message, extra={"function": function, **fields})


def incident_store(settings: Settings) -> DynamoIncidentStore:
    """The store on the table that the settings name."""
    return DynamoIncidentStore(client("dynamodb"), settings.table)


def recorded_driver(incident: Incident, execution: str, settings: Settings) -> str:  # noqa: ARG001 - as `DrivenBy`
    """`DrivenBy` by what is on record: an execution takes the incident up at its start, or not at all."""
    return "" if may_drive(incident, execution) else incident.execution


def workflow_handler(
    function: str,
    state: str,
    act: Act,
    *,
    after_save: Callable[[Work], None] | None = None,
    driven_by: DrivenBy = recorded_driver,
) -> Handler:
    """The Lambda handler of a state of the workflow.

    `function` is the folder's name, `state` the state's in the state machine. `after_save` runs once the answer is
    stored, with the incident as stored: for what may be seen only then, like completing a token. Raises only
    `TransientError` for what the state machine should retry; any other error leads to Escalate (`JobLostError`, before
    anything is done), and `DrivenElsewhereError`, before anything is done, to the execution's end.
    """

    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001 - Lambda's signature
        with normalised_errors():
            work = _taken_up(_work(function, event), driven_by)
            # Not only where a person chooses: the job may be lost at any time after that.
            if lost := job_lost(work.incident, state, holder=work.store.job_holder(work.incident.job)):
                raise JobLostError(lost)
            answer = act(work)
            stored = work.store.save(
                answered(answer.incident, state=state, outcome=str(answer.outcome), reason=answer.reason, now=work.now)
            )
            _announce(function, state, stored, answer)
            if after_save is not None:
                after_save(dataclasses.replace(work, incident=stored))
            return Result(
                incident_id=stored.incident_id,
                outcome=answer.outcome,
                reason=answer.reason,
                wait_seconds=answer.wait_seconds,
            ).to_json()

    return traced(function, handle)


def traced(function: str, handle: Handler) -> Handler:
    """The handler under the function's tracer, with failures logged and counted."""

    @functools.wraps(handle)
    def outer(event: dict[str, Any], context: Any) -> dict[str, Any]:
        seen = observability(function)
        try:
            captured: Handler = seen.tracer.capture_lambda_handler(handle, capture_response=False)
            return captured(event, context)
        except Exception as error:
            seen.logger.exception("failed", extra={"function": function, "error": type(error).__name__})
            count(function, "Failures")
            raise

    return outer


@contextmanager
def normalised_errors() -> Iterator[None]:
    """Raise every error that another try may cure under the one name that the state machine retries."""
    try:
        with transient_errors():
            yield
    except TransientError as error:
        if type(error) is TransientError:
            raise
        raise TransientError(str(error)) from error


def _work(function: str, event: Mapping[str, Any]) -> Work:
    settings = settings_from_environment(function)
    store = incident_store(settings)
    clock = SystemClock()
    incident = store.load(str(event["incident_id"]))
    return Work(
        incident=incident,
        settings=settings,
        policy=settings.policy(incident.job.cluster_arn),
        store=store,
        clock=clock,
        now=clock.now(),
        task_token=str(event.get("task_token", "")),
        event=event,
    )


def _taken_up(work: Work, driven_by: DrivenBy) -> Work:
    """The work with its execution on record as the incident's, stored before anything is done: of two only one gets on.

    Raises `DrivenElsewhereError`. An event without `execution` is no state machine's.
    """
    execution, incident = str(work.event.get("execution") or ""), work.incident
    if execution in ("", incident.execution):
        return work
    if other := driven_by(incident, execution, work.settings):
        raise DrivenElsewhereError(
            f"execution {other.rpartition(':')[2]} drives incident {incident.incident_id}: this one, "
            f"{execution.rpartition(':')[2]}, does nothing and ends. Decide on the incident's page; to start anew by "
            'hand, stop that one first, and give {"incident_id"} alone'
        )
    return dataclasses.replace(work, incident=work.store.save(incident.evolve(execution=execution)))


def _announce(function: str, state: str, incident: Incident, answer: Answer) -> None:
    """One log line and one count a decision."""
    log(
        function,
        "decided",
        state=state,
        incident_id=incident.incident_id,
        job=str(incident.job),
        run_id=incident.alarm.run.run_id,
        step=incident.alarm.step,
        action=str(answer.outcome),
        reason=answer.reason,
        dry_run=incident.dry_run,
    )
    count(function, "Decisions", state=state, outcome=str(answer.outcome))
