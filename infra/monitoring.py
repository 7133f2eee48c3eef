"""Alarms on the recovery itself: a recovery that fails silently is worse than none."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

_PERIOD = cdk.Duration.minutes(1)


class Monitoring(Construct):
    """One alarm a way in which an event or an incident can be lost; each announces on the topic."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        topic: sns.ITopic,
        dead_letters: sqs.IQueue,
        state_machine: stepfunctions.StateMachine,
        intake: list[lambda_.Function],
    ) -> None:
        super().__init__(scope, construct_id)
        self._action = actions.SnsAction(topic)
        self._alarm(
            "DeadLettersPresent",
            dead_letters.metric_approximate_number_of_messages_visible(period=_PERIOD, statistic="Maximum"),
            "Events reached no function, or a function refused them. Read the queue, fix the cause, send them again.",
        )
        failures = {
            "ExecutionsFailed": state_machine.metric_failed(period=_PERIOD),
            "ExecutionsTimedOut": state_machine.metric_timed_out(period=_PERIOD),
            "ExecutionsAborted": state_machine.metric_aborted(period=_PERIOD),
        }
        for name, metric in failures.items():
            self._alarm(name, metric, "An incident's recovery ended early. Continue it: truestep incidents resume ID.")
        for function in intake:
            self._alarm(
                f"{function.node.id}Errors",
                function.metric_errors(period=_PERIOD),
                "Intake fails: alarms may not become incidents. Events are retried, then kept as dead letters.",
            )

    def _alarm(self, construct_id: str, metric: cloudwatch.Metric, description: str) -> None:
        alarm = cloudwatch.Alarm(
            self,
            construct_id,
            metric=metric,
            threshold=1,
            evaluation_periods=1,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
            alarm_description=description,
        )
        alarm.add_alarm_action(self._action)
