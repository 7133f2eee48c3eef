"""Events from training, validated against the schemas that the training side was built with."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import fastjsonschema  # what Powertools validates with, in its extra of that name

from lambdas.domain.errors import AlarmRefusedError
from truestep.contract import DetailType, schema

MOST_NESTED = 100
"""Levels of a detail. Training sends about ten; what keeps and reads it later recurses as deep as it goes."""


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
    if _nested_deeper(detail, MOST_NESTED):
        raise AlarmRefusedError(f"{detail_type}: the detail is nested more than {MOST_NESTED} deep")
    try:
        json.dumps(detail, ensure_ascii=False).encode()
    except ValueError as error:
        raise AlarmRefusedError(f"{detail_type}: the detail holds text that is no UTF-8: {error}") from error
    try:
        _validator(detail_type)(dict(detail))
    except fastjsonschema.JsonSchemaValueException as error:
        raise AlarmRefusedError(f"{detail_type}: {error.message[:1000]}") from error
    return detail_type, detail


def _nested_deeper(document: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other deeper than so many levels. Looks without recursion."""
    layer = [document]
    for _ in range(levels + 1):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, (Mapping, list))
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not layer:
            return False
    return True


@functools.cache
def _validator(detail_type: DetailType) -> Callable[[dict[str, Any]], Any]:
    """Compiled once an instance: compiling costs more than everything else that a repeated alarm costs."""
    compiled: Callable[[dict[str, Any]], Any] = fastjsonschema.compile(schema(detail_type))
    return compiled
