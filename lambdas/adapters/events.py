"""Events from training, validated against the schemas that the training side was built with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.validation import SchemaValidationError, validate

from lambdas.domain.errors import AlarmRefusedError
from truestep.contract import DetailType, schema


def event_detail(event: Mapping[str, Any], *allowed: DetailType) -> tuple[DetailType, Mapping[str, Any]]:
    """Detail type and detail of an EventBridge event.

    Raises `AlarmRefusedError` for a type that is not allowed here, or a detail that does not match its schema: the
    event then goes to the dead-letter queue, where a person finds it.
    """
    try:
        detail_type = DetailType(str(event.get("detail-type")))
    except ValueError:
        raise AlarmRefusedError(f"unknown detail-type {event.get('detail-type')!r}") from None
    if detail_type not in allowed:
        raise AlarmRefusedError(f"{detail_type} is not for this function; check the rule's event pattern")
    detail = event.get("detail")
    if not isinstance(detail, Mapping):
        raise AlarmRefusedError(f"{detail_type}: the event has no detail object")
    try:
        json.dumps(detail, ensure_ascii=False).encode()
    except ValueError as error:
        raise AlarmRefusedError(f"{detail_type}: the detail holds text that is no UTF-8: {error}") from error
    try:
        validate(event=dict(detail), schema=schema(detail_type))
    except SchemaValidationError as error:
        raise AlarmRefusedError(f"{detail_type}: {error}") from error
    return detail_type, detail
