"""From the event bus to the functions that take events in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.configuration import DeploymentSettings
from truestep.contract.events import SOURCE_TRAINING, DetailType

_SOURCES: Final = events.Match.prefix(SOURCE_TRAINING)
"""Wider than what is taken: the functions refuse a wrong source loudly, where a rule would drop it without a word."""
_RETRY_FOR = cdk.Duration.hours(6)


class EventBus(Construct):
    """The bus that training pods put events on: made here, or an existing one."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: DeploymentSettings) -> None:
        super().__init__(scope, construct_id)
        self.bus: events.IEventBus
        if settings.existing_event_bus_name:
            self.bus = events.EventBus.from_event_bus_name(self, "Bus", settings.existing_event_bus_name)
            return
        self.bus = events.EventBus(self, "Bus", event_bus_name=f"truestep-{settings.stage}")
        sources = [source for cluster in settings.clusters for source in cluster.event_sources]
        accounts = dict.fromkeys((cdk.Aws.ACCOUNT_ID, *settings.training_account_ids))
        for index, account in enumerate(accounts):
            statement = iam.PolicyStatement(
                sid=f"TrainingAccount{index}",
                principals=[iam.AccountPrincipal(account)],
                actions=["events:PutEvents"],
                resources=[self.bus.event_bus_arn],
                conditions={"StringEquals": {"events:source": sources}},
            )
            events.CfnEventBusPolicy(
                self,
                f"TrainingAccount{index}",
                statement_id=f"TrainingAccount{index}",
                event_bus_name=self.bus.event_bus_name,
                statement=statement.to_statement_json(),
            )


class Intake(Construct):
    """Rules, and a dead-letter queue for what neither delivery nor function could handle."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        bus: events.IEventBus,
        receive_alarm: lambda_.Function,
        record_training_event: lambda_.Function,
        notice_end: lambda_.Function,
        recovery_arn: str,
    ) -> None:
        """recovery_arn: of the state machine whose executions may end early."""
        super().__init__(scope, construct_id)
        self.dead_letters = sqs.Queue(
            self,
            "DeadLetters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=cdk.Duration.days(14),
        )
        acknowledge(self.dead_letters, "It is the dead-letter queue.", "SQS3")
        others = [kind for kind in DetailType if kind is not DetailType.ALARM]
        self._route("AlarmRule", _from_training([DetailType.ALARM]), receive_alarm, bus)
        self._route("TrainingEventRule", _from_training(others), record_training_event, bus)
        # AWS' own events come to the account's default bus alone.
        self._route("ExecutionEndRule", _ended_early(recovery_arn), notice_end, None)

    def _route(
        self,
        construct_id: str,
        pattern: events.EventPattern,
        function: lambda_.Function,
        bus: events.IEventBus | None,
    ) -> None:
        rule = events.Rule(self, construct_id, event_bus=bus, event_pattern=pattern)
        rule.add_target(
            targets.LambdaFunction(
                function, dead_letter_queue=self.dead_letters, retry_attempts=185, max_event_age=_RETRY_FOR
            )
        )
        # The rule's queue takes what could not be delivered; what the function refused or failed on, only this does.
        # The L2 destination would also grant reading the queue's attributes, which nobody does.
        lambda_.CfnEventInvokeConfig(
            self,
            f"{construct_id}Failures",
            function_name=function.function_name,
            qualifier="$LATEST",
            maximum_retry_attempts=2,
            maximum_event_age_in_seconds=int(_RETRY_FOR.to_seconds()),
            destination_config=lambda_.CfnEventInvokeConfig.DestinationConfigProperty(
                on_failure=lambda_.CfnEventInvokeConfig.OnFailureProperty(destination=self.dead_letters.queue_arn)
            ),
        )
        function.add_to_role_policy(
            iam.PolicyStatement(actions=["sqs:SendMessage"], resources=[self.dead_letters.queue_arn])
        )


def _from_training(kinds: Sequence[DetailType]) -> events.EventPattern:
    return events.EventPattern(source=_SOURCES, detail_type=[kind.value for kind in kinds])


def _ended_early(recovery_arn: str) -> events.EventPattern:
    """Executions that ended otherwise than by closing their incident."""
    return events.EventPattern(
        source=["aws.states"],
        detail_type=["Step Functions Execution Status Change"],
        detail={"stateMachineArn": [recovery_arn], "status": ["FAILED", "TIMED_OUT", "ABORTED"]},
    )
