"""Gap: PutEvents with a Lambda or Step Functions target is HTTP 500, disabled rules deliver, an event's `time` is a
float and an internal member leaks.

Delivered through the edge like any other call, retried as the target's retry policy says (in shortened time), then sent
to the target's dead-letter queue with EventBridge's attributes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from moto.events.models import Rule
from moto.events.utils import EventTemplateParser
from moto.utilities.arns import parse_arn

from local_stack.access_keys import EVENTBRIDGE, SECRET_ACCESS_KEY

_SERVED = frozenset({"lambda", "states"})
_MAX_ATTEMPTS = 4
_RETRY_SECONDS = 0.2
_RETRYABLE_STATUS = 429

_deliveries = ThreadPoolExecutor(max_workers=8, thread_name_prefix="event-delivery")
_clients = threading.Lock()


def published(event: Mapping[str, Any], account_id: str) -> dict[str, Any]:
    """Return the event as a target sees it: ISO 8601 `time`, the account, and no `ingestion-time`."""
    seen = {name: value for name, value in event.items() if name != "ingestion-time"}
    seen["account"] = account_id
    if isinstance(seen.get("time"), int | float):
        seen["time"] = datetime.fromtimestamp(seen["time"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return seen


def target_input(target: Mapping[str, Any], event: dict[str, Any]) -> str:
    """Return the JSON text that the target receives: constant input, transformed, or the whole event."""
    if target.get("Input") is not None:
        return str(target["Input"])
    transformer = target.get("InputTransformer")
    if transformer:
        paths = transformer.get("InputPathsMap", {})
        parsed = EventTemplateParser.parse(transformer["InputTemplate"], paths, event)
        return parsed if isinstance(parsed, str) else json.dumps(parsed)
    return json.dumps(event)


@cache
def _client(service: str, region: str) -> Any:
    return boto3.session.Session().client(
        service,
        region_name=region,
        endpoint_url=f"http://127.0.0.1:{os.environ['MOTO_PORT']}",
        aws_access_key_id=EVENTBRIDGE,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(retries={"total_max_attempts": 1}),
    )


def _call(arn: str, payload: str, event_id: str) -> None:
    parsed = parse_arn(arn)
    with _clients:
        client = _client("stepfunctions" if parsed.service == "states" else parsed.service, parsed.region)
    if parsed.service == "states":
        client.start_execution(stateMachineArn=arn, name=event_id, input=payload)
    else:
        client.invoke(FunctionName=arn, InvocationType="Event", Payload=payload)


def deliver(target: Mapping[str, Any], payload: str, event_id: str, rule_arn: str, call: Callable[..., None]) -> None:
    """Call the target until it accepts, at most as often as its policy allows; then use its dead-letter queue."""
    attempts = min(_MAX_ATTEMPTS, 1 + int(target.get("RetryPolicy", {}).get("MaximumRetryAttempts", 185)))
    code = message = ""
    for attempt in range(1, attempts + 1):
        try:
            call(target["Arn"], payload, event_id)
        except ClientError as error:
            code, message = error.response["Error"]["Code"], error.response["Error"]["Message"]
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status < 500 and status != _RETRYABLE_STATUS:
                break
        except BotoCoreError as error:
            code, message = type(error).__name__, str(error)
        else:
            return
        if attempt < attempts:
            time.sleep(_RETRY_SECONDS * 2**attempt)
    _dead_letter(target, payload, rule_arn, code, message)


def _dead_letter(target: Mapping[str, Any], payload: str, rule_arn: str, code: str, message: str) -> None:
    queue_arn = target.get("DeadLetterConfig", {}).get("Arn")
    if queue_arn is None:
        return
    parsed = parse_arn(queue_arn)
    with _clients:
        client = _client("sqs", parsed.region)
    attributes = {"RULE_ARN": rule_arn, "TARGET_ARN": target["Arn"], "ERROR_CODE": code, "ERROR_MESSAGE": message}
    client.send_message(
        QueueUrl=client.get_queue_url(QueueName=parsed.resource_id)["QueueUrl"],
        MessageBody=payload,
        MessageAttributes={
            name: {"DataType": "String", "StringValue": value or "-"} for name, value in attributes.items()
        },
    )


def install() -> None:
    """Deliver to Lambda and Step Functions here; moto keeps its other targets."""
    send = Rule.send_to_targets

    def send_to_all(self: Any, original_event: Any, transform_input: bool = True) -> None:
        if self.state == "DISABLED" or not self.event_pattern.matches_event(original_event):
            return
        ours = [target for target in self.targets if parse_arn(target["Arn"]).service in _SERVED]
        event = published(original_event, self.created_by)
        for target in ours:
            _deliveries.submit(deliver, target, target_input(target, event), event["id"], self.arn, _call)
        if len(ours) < len(self.targets):
            others = _WithTargets(self, [target for target in self.targets if target not in ours])
            send(others, original_event, transform_input)

    Rule.send_to_targets = send_to_all


class _WithTargets:
    """A rule seen with some of its targets, so that one rule can be sent from several threads."""

    def __init__(self, rule: Any, targets: list[dict[str, Any]]) -> None:
        self._rule = rule
        self.targets = targets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)
