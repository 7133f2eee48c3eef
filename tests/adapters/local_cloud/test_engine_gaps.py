"""What the workflow engine lacks without the adapters, each shown on the running engine."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from typing import Any

import moto
import pytest

from local_stack import LocalStack
from local_stack.cloud import moto_gaps
from local_stack.cloud.moto_gaps.jsonata_evaluation import ExpressionError, evaluate

ROLE = "arn:aws:iam::123456789012:role/machine"


def run(cloud: LocalStack, states: dict[str, Any], start: str, given: Any = None) -> dict[str, Any]:
    """Run a JSONata state machine to its end; returns its description with `output` decoded."""
    client = cloud.client("stepfunctions")
    definition = {"QueryLanguage": "JSONata", "StartAt": start, "States": states}
    arn = client.create_state_machine(name=uuid.uuid4().hex, definition=json.dumps(definition), roleArn=ROLE)
    execution = client.start_execution(
        stateMachineArn=arn["stateMachineArn"], name=uuid.uuid4().hex, input=json.dumps(given or {})
    )
    deadline = time.monotonic() + 30
    while (described := client.describe_execution(executionArn=execution["executionArn"]))["status"] == "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    result: dict[str, Any] = described | {"output": json.loads(described.get("output", "null"))}
    return result


def test_the_adapters_are_pinned_to_the_installed_moto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moto.__version__ == moto_gaps.PINNED_MOTO
    monkeypatch.setattr(moto, "__version__", "9.9.9")
    with pytest.raises(moto_gaps.MotoVersionError, match=r"moto 9\.9\.9 is installed.*moto==5\.2\.5"):
        moto_gaps.install()


def test_assign_output_and_choice_evaluate_jsonata_whatever_the_text_holds(cloud: LocalStack) -> None:
    awkward = 'a "quoted" \\ back\nslash, ü'
    states = {
        "Keep": {
            "Type": "Pass",
            "Assign": {"text": "{% $states.input.text %}", "count": "{% $count($states.input.items) %}"},
            "Next": "Decide",
        },
        "Decide": {
            "Type": "Choice",
            "Choices": [{"Condition": "{% $count > 1 and $text = $states.input.text %}", "Next": "Tell"}],
            "Default": "Wrong",
        },
        "Tell": {
            "Type": "Succeed",
            "Output": {"text": "{% $text %}", "nothing": None, "name": "{% $states.context.Execution.Input.text %}"},
        },
        "Wrong": {"Type": "Fail", "Error": "Wrong"},
    }

    result = run(cloud, states, "Keep", {"text": awkward, "items": [1, 2]})

    assert result["status"] == "SUCCEEDED"
    assert result["output"] == {"text": awkward, "nothing": None, "name": awkward}


def test_a_wait_takes_its_seconds_from_an_expression_and_is_scaled(cloud: LocalStack) -> None:
    states = {
        "Wait": {"Type": "Wait", "Seconds": "{% $states.input.seconds %}", "Next": "Done"},
        "Done": {"Type": "Succeed"},
    }

    started = time.monotonic()
    result = run(cloud, states, "Wait", {"seconds": 100})

    assert result["status"] == "SUCCEEDED"
    assert 1.0 <= time.monotonic() - started < 25


def test_an_expression_that_fails_is_a_query_evaluation_error_that_can_be_caught(cloud: LocalStack) -> None:
    states = {
        "Compute": {
            "Type": "Task",
            "Resource": "arn:aws:states:::lambda:invoke",
            "Arguments": {"FunctionName": "test-Echo", "Payload": "{% $number('not a number') %}"},
            "Catch": [{"ErrorEquals": ["States.QueryEvaluationError"], "Next": "Caught"}],
            "End": True,
        },
        "Caught": {"Type": "Succeed", "Output": {"caught": True}},
    }

    assert run(cloud, states, "Compute")["output"] == {"caught": True}


def test_a_function_s_error_class_selects_the_catcher(cloud: LocalStack) -> None:
    states = {
        "Call": {
            "Type": "Task",
            "Resource": "arn:aws:states:::lambda:invoke",
            "Arguments": {"FunctionName": "test-Fail"},
            "Catch": [
                {"ErrorEquals": ["RuntimeError"], "Next": "Wrong"},
                {
                    "ErrorEquals": ["QuotaExceededError"],
                    "Output": {"error": "{% $states.errorOutput.Error %}"},
                    "Next": "Right",
                },
            ],
            "End": True,
        },
        "Right": {"Type": "Succeed"},
        "Wrong": {"Type": "Fail"},
    }

    assert run(cloud, states, "Call")["output"] == {"error": "QuotaExceededError"}
    called = [
        call for call in cloud.calls() if call["resource"] == "test-Fail" and call["access_key"] == "LOCALmachine"
    ]
    assert called


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2", 3),
        ("$sum([1, 2.5])", 3.5),
        ("{'a': null, 'b': [1]}", {"a": None, "b": [1]}),
        ("$merge([{'a': 1}, {'b': 2}])", {"a": 1, "b": 2}),
        ("$substring('abcdef', 0, 3)", "abc"),
        ("$exists(nothing)", False),
        ("nothing", None),
        ("$hash('truestep', 'SHA-256')", hashlib.sha256(b"truestep").hexdigest()),
    ],
)
def test_expressions(expression: str, value: Any) -> None:
    assert evaluate(expression) == value


def test_a_uuid_is_new_each_time() -> None:
    first, second = (uuid.UUID(evaluate("$uuid()")) for _ in range(2))

    assert first != second
    assert first.version == 4


@pytest.mark.parametrize("expression", ["1 +", "$number('x')", "$nosuchfunction(1)", "$hash('a', 'CRC')"])
def test_a_bad_expression_is_an_error(expression: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(expression)
