"""Alarms on the recovery itself, and what people look at when one rings.

A recovery that fails silently is worse than none.

Every alarm has a section of its own name in docs/runbook.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from infra.configuration import DeploymentSettings
from infra.environment import metrics_namespace

_PERIOD = cdk.Duration.minutes(1)
RUNBOOK = "docs/runbook.md"


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is looked at."""

    topic: sns.ITopic
    dead_letters: sqs.IQueue
    state_machine: stepfunctions.StateMachine
    functions: Mapping[str, lambda_.Function]
    """Folder -> function."""


class Monitoring(Construct):
    """One alarm a way in which an event or an incident can be lost or forgotten; each announces on the topic."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: DeploymentSettings, watched: Watched) -> None:
        super().__init__(scope, construct_id)
        self._settings = settings
        self._watched = watched
        self._action = actions.SnsAction(watched.topic)
        self.alarms: list[cloudwatch.IAlarm] = []
        self._delivery()
        self._executions()
        self._people()
        self._training()
        Dashboard(self, "Dashboard", settings=settings, watched=watched, alarms=self.alarms)
        SavedQueries(self, "Queries", settings=settings, watched=watched)

    def _delivery(self) -> None:
        queue = self._watched.dead_letters
        self._alarm(
            "DeadLettersPresent",
            queue.metric_approximate_number_of_messages_visible(period=_PERIOD, statistic="Maximum"),
            "Events reached no function, or a function refused them. Read the queue, fix the cause, send them again.",
        )
        for folder in ("receive_alarm", "record_training_event"):
            function = self._watched.functions[folder]
            self._alarm(
                f"{function.node.id}Errors",
                function.metric_errors(period=_PERIOD),
                "Intake fails: alarms may not become incidents. Events are retried, then kept as dead letters.",
            )
        self._alarm(
            "DecideApprovalErrors",
            self._watched.functions["decide_approval"].metric_errors(period=_PERIOD),
            "No decision can be recorded, on the page, by terminal or by console. Nodes stay quarantined meanwhile.",
        )

    def _executions(self) -> None:
        machine = self._watched.state_machine
        failures = {
            "ExecutionsFailed": machine.metric_failed(period=_PERIOD),
            "ExecutionsTimedOut": machine.metric_timed_out(period=_PERIOD),
            "ExecutionsAborted": machine.metric_aborted(period=_PERIOD),
        }
        for name, metric in failures.items():
            self._alarm(name, metric, "A recovery ended early; its node stays quarantined. Choose where it goes on.")
        self._alarm(
            "RecoveryEscalated",
            self._decisions("escalate", "Escalate", "waiting"),
            "A recovery stopped and waits for a person to say where it goes on.",
        )

    def _people(self) -> None:
        self._alarm(
            "ApprovalsWaiting",
            self._counter("request_approval", "ApprovalReminders"),
            "Nobody has answered an approval for four hours. A reminder with a new link was sent.",
        )
        self._alarm(
            "BreakerTripped",
            self._counter("resolve_node", "BreakerTripped"),
            "The circuit breaker refused a quarantine: as many nodes are in quarantine as the policy allows.",
        )

    def _training(self) -> None:
        hours = self._settings.training_silence_hours
        if not hours:
            return
        events = self._watched.functions["record_training_event"].metric_invocations(period=cdk.Duration.hours(1))
        self._alarm(
            "TrainingSilent",
            events,
            f"No job has reported a checkpoint, a resume or an audit for {hours} h: the SDK is off, or cannot reach "
            "the bus. No training at all? Set training_silence_hours to 0.",
            periods=hours,
            silence=True,
        )

    def _alarm(
        self,
        construct_id: str,
        metric: cloudwatch.Metric,
        description: str,
        *,
        periods: int = 1,
        silence: bool = False,
    ) -> None:
        operators, missing = cloudwatch.ComparisonOperator, cloudwatch.TreatMissingData
        alarm = cloudwatch.Alarm(
            self,
            construct_id,
            alarm_name=f"truestep-{self._settings.stage}-{construct_id}",
            metric=metric,
            threshold=1,
            evaluation_periods=periods,
            comparison_operator=operators.LESS_THAN_THRESHOLD
            if silence
            else operators.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=missing.BREACHING if silence else missing.NOT_BREACHING,
            alarm_description=f"{description} See {RUNBOOK}#{construct_id.lower()}.",
        )
        alarm.add_alarm_action(self._action)
        self.alarms.append(alarm)

    def _counter(self, folder: str, name: str) -> cloudwatch.Metric:
        return _metric(self._settings, name, service=folder, function=folder)

    def _decisions(self, folder: str, state: str, outcome: str) -> cloudwatch.Metric:
        return _metric(self._settings, "Decisions", service=folder, function=folder, state=state, outcome=outcome)


class Dashboard(Construct):
    """What happens now: alarms, events in, what was decided, what waits, what fails."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: DeploymentSettings,
        watched: Watched,
        alarms: list[cloudwatch.IAlarm],
    ) -> None:
        super().__init__(scope, construct_id)
        period = cdk.Duration.minutes(5)
        receive, record = watched.functions["receive_alarm"], watched.functions["record_training_event"]
        functions = list(watched.functions.values())
        namespace = metrics_namespace(settings.stage)
        decisions = cloudwatch.MathExpression(
            expression="SEARCH('{"
            + namespace
            + ",function,outcome,service,state} MetricName=\"Decisions\"', 'Sum', 300)",
            label="",
            period=period,
        )
        cloudwatch.Dashboard(
            self,
            "Board",
            dashboard_name=f"truestep-{settings.stage}",
            widgets=[
                [cloudwatch.AlarmStatusWidget(title="Alarms", alarms=alarms, width=24, height=4)],
                [
                    _graph(
                        "Events from training",
                        [
                            receive.metric_invocations(period=period, label="alarms"),
                            record.metric_invocations(period=period, label="checkpoints, resumes, audits"),
                        ],
                    ),
                    _graph("What the recovery decided", [decisions]),
                    _graph(
                        "Executions",
                        [
                            watched.state_machine.metric_started(period=period, label="started"),
                            watched.state_machine.metric_succeeded(period=period, label="succeeded"),
                            watched.state_machine.metric_failed(period=period, label="failed"),
                        ],
                    ),
                ],
                [
                    _graph("Errors", [one.metric_errors(period=period, label=one.node.id) for one in functions]),
                    _graph(
                        "Slowest call of each function, ms",
                        [
                            one.metric_duration(period=period, statistic="Maximum", label=one.node.id)
                            for one in functions
                        ],
                    ),
                    _graph(
                        "Dead letters",
                        [watched.dead_letters.metric_approximate_number_of_messages_visible(period=period)],
                    ),
                ],
            ],
        )


class SavedQueries(Construct):
    """Logs Insights queries over the functions' structured logs."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: DeploymentSettings, watched: Watched) -> None:
        super().__init__(scope, construct_id)
        groups = [function.log_group for function in watched.functions.values()]
        for name, (title, lines) in QUERIES.items():
            logs.CfnQueryDefinition(
                self,
                name,
                name=f"truestep-{settings.stage}/{title}",
                query_string="\n| ".join(lines),
                log_group_names=[group.log_group_name for group in groups],
            )


QUERIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Timeline": (
        "One incident, in order",
        (
            "fields @timestamp, state, action, reason",
            "filter incident_id = 'inc-REPLACE-ME' and message = 'decided'",
            "sort @timestamp asc",
        ),
    ),
    "Failures": (
        "Errors by function",
        ("filter level = 'ERROR'", "stats count(*) as errors, latest(exception) as newest by function, error"),
    ),
    "Decisions": (
        "Decisions by state",
        ("filter message = 'decided'", "stats count(*) as decisions by state, action, dry_run"),
    ),
    "Intake": (
        "Alarms taken in",
        (
            "filter message = 'alarm taken in'",
            "fields @timestamp, job, step, incident_id, reason",
            "sort @timestamp desc",
        ),
    ),
    "Slow": (
        "Slow calls",
        (
            "filter @type = 'REPORT' or type = 'platform.report'",
            "stats max(coalesce(record.metrics.durationMs, @duration)) as slowest_ms by @log",
            "sort slowest_ms desc",
        ),
    ),
}
"""Construct id -> title and the query's commands. Field names are those of lambdas.adapters.runtime."""


def _metric(settings: DeploymentSettings, name: str, **dimensions: str) -> cloudwatch.Metric:
    return cloudwatch.Metric(
        namespace=metrics_namespace(settings.stage),
        metric_name=name,
        dimensions_map=dimensions,
        statistic="Sum",
        period=_PERIOD,
    )


def _graph(title: str, metrics: list[cloudwatch.IMetric]) -> cloudwatch.GraphWidget:
    return cloudwatch.GraphWidget(title=title, left=metrics, width=8, height=6)
