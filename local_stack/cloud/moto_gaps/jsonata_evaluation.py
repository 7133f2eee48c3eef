"""Gap: moto parses JSONata but has no evaluator, quotes string variables without escaping, and lacks $uuid and $hash.

Evaluated by jsonata-python. A failing expression becomes `States.QueryEvaluationError`, as on Step Functions.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

from jsonata.jsonata import Jsonata
from moto.stepfunctions.parser.api import EvaluationFailedEventDetails, HistoryEventType
from moto.stepfunctions.parser.asl.component.common.error_name.failure_event import (
    FailureEvent,
    FailureEventException,
)
from moto.stepfunctions.parser.asl.component.common.error_name.states_error_name import StatesErrorName
from moto.stepfunctions.parser.asl.component.common.error_name.states_error_name_type import StatesErrorNameType
from moto.stepfunctions.parser.asl.component.common.string import string_expression
from moto.stepfunctions.parser.asl.component.intrinsic import jsonata as intrinsic
from moto.stepfunctions.parser.asl.eval import states, variable_store
from moto.stepfunctions.parser.asl.eval.event.event_detail import EventDetails
from moto.stepfunctions.parser.asl.jsonata import jsonata as engine
from moto.stepfunctions.parser.asl.jsonata import validations
from moto.stepfunctions.parser.asl.utils.encoding import to_json_str  # knows the context object's times

_HASHES = {"MD5": "md5", "SHA-1": "sha1", "SHA-256": "sha256", "SHA-384": "sha384", "SHA-512": "sha512"}


class ExpressionError(ValueError):
    """A JSONata expression could not be parsed or evaluated."""


def evaluate(expression: str) -> Any:
    """Evaluate a self-contained expression to plain JSON values; undefined is None. Raises ExpressionError."""
    try:
        program = Jsonata(expression)
        program.register_lambda("uuid", lambda: str(uuid.uuid4()))
        program.register_lambda("hash", _hash)
        return json.loads(json.dumps(program.evaluate(None)))
    except Exception as error:
        raise ExpressionError(str(error)) from error


def declare_variables(bindings: Mapping[str, Any]) -> str:
    """Return the JSONata assignments of `bindings`: a JSON literal, an escaped string too, is a JSONata literal."""
    return "".join(f"{name}:={to_json_str(value, separators=(',', ':'))};" for name, value in bindings.items())


def _hash(value: str, algorithm: str = "SHA-256") -> str:
    if algorithm not in _HASHES:
        raise ExpressionError(f"$hash knows {', '.join(_HASHES)}, not {algorithm}")
    return hashlib.new(_HASHES[algorithm], value.encode(), usedforsecurity=False).hexdigest()


def install() -> None:
    """Give the engine its evaluator, and turn evaluation errors into the states language's own error."""
    for module in (engine, string_expression, validations):
        module.eval_jsonata_expression = evaluate
    for module in (engine, states, variable_store):
        module.encode_jsonata_variable_declarations = declare_variables
    for name in ("$uuid", "$hash"):
        intrinsic._DECLARATION_BY_VARIABLE_REFERENCE.pop(name)

    evaluate_body = string_expression.StringJSONata._eval_body

    def evaluate_or_fail(self: Any, env: Any) -> None:
        try:
            evaluate_body(self, env)
        except ExpressionError as error:
            raise FailureEventException(_query_evaluation_error(env, self.expression, error)) from error

    string_expression.StringJSONata._eval_body = evaluate_or_fail


def _query_evaluation_error(env: Any, expression: str, error: Exception) -> Any:
    name = StatesErrorName(typ=StatesErrorNameType.StatesQueryEvaluationError)
    details = EvaluationFailedEventDetails(
        error=name.error_name, cause=f"The JSONata expression '{expression}' threw an error: {error}"
    )
    return FailureEvent(
        env=env,
        error_name=name,
        event_type=HistoryEventType.EvaluationFailed,
        event_details=EventDetails(evaluationFailedEventDetails=details),
    )
