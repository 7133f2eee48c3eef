"""Functions run as Lambda runs them: own process, own environment, the service's words for every way to fail."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from local_stack import LocalStack


def invoke(cloud: LocalStack, name: str, event: Any = None, **arguments: Any) -> tuple[str | None, Any]:
    """Return (function error, payload)."""
    answer = cloud.client("lambda").invoke(FunctionName=f"test-{name}", Payload=json.dumps(event or {}), **arguments)
    text = answer["Payload"].read()
    return answer.get("FunctionError"), json.loads(text) if text else None


def test_a_function_sees_its_event_its_limits_and_the_template_s_environment_alone(
    cloud: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, seen = invoke(cloud, "Echo", {"a": [1, None, "ü"]})

    assert error is None
    assert seen["event"] == {"a": [1, None, "ü"]}
    assert 15_000 < seen["remaining_ms"] <= 20_000
    environment = seen["environment"]
    assert environment["TOPIC"] == cloud.outputs["TopicArn"]
    assert environment["AWS_ENDPOINT_URL"] == cloud.endpoint_url
    assert environment["AWS_ACCESS_KEY_ID"] == "LOCALworker"
    assert environment["AWS_LAMBDA_FUNCTION_NAME"] == "test-Echo"
    assert environment["LAMBDA_TASK_ROOT"] == seen["directory"]
    assert "PYTEST_CURRENT_TEST" not in environment
    assert "HOME" not in environment


def test_a_warm_instance_is_used_again_with_a_new_request_id(cloud: LocalStack) -> None:
    _, first = invoke(cloud, "Echo")
    _, second = invoke(cloud, "Echo")

    assert first["pid"] == second["pid"]
    assert first["request_id"] != second["request_id"]


def test_an_exception_is_reported_by_its_class(cloud: LocalStack) -> None:
    error, payload = invoke(cloud, "Fail")

    assert error == "Unhandled"
    assert (payload["errorType"], payload["errorMessage"]) == ("QuotaExceededError", "no quota left")
    assert payload["stackTrace"]


def test_a_function_that_is_too_slow_is_killed_and_the_next_event_gets_a_new_instance(cloud: LocalStack) -> None:
    _, first_pid = invoke(cloud, "Obey")
    error, payload = invoke(cloud, "Obey", {"sleep": 30})
    _, second_pid = invoke(cloud, "Obey")

    assert error == "Unhandled"
    assert payload["errorType"] == "Sandbox.Timedout"
    assert "timed out after 1.00 seconds" in payload["errorMessage"]
    assert first_pid != second_pid


def test_a_crash_is_an_exit_error_and_the_next_event_gets_a_new_instance(cloud: LocalStack) -> None:
    error, payload = invoke(cloud, "Obey", {"exit": 3})
    _, pid = invoke(cloud, "Obey")

    assert error == "Unhandled"
    assert payload["errorType"] == "Runtime.ExitError"
    assert "exit status 3" in payload["errorMessage"]
    assert isinstance(pid, int)


def test_a_module_that_cannot_be_imported_is_an_initialisation_error(cloud: LocalStack) -> None:
    error, payload = invoke(cloud, "Broken")

    assert error == "Unhandled"
    assert payload["errorType"] == "Runtime.ImportModuleError"


def test_events_at_the_same_time_run_in_different_processes(cloud: LocalStack) -> None:
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: invoke(cloud, "Obey", {"sleep": 0.5}), range(2)))

    pids = [pid for error, pid in answers if error is None]
    assert len(set(pids)) == 2


def test_more_events_than_instances_wait_for_their_turn(cloud: LocalStack) -> None:
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: invoke(cloud, "Obey", {"sleep": 0.2}), range(6)))

    assert [error for error, _ in answers] == [None] * 6
    assert len({pid for _, pid in answers}) <= 3


def test_an_unknown_function_is_not_found_and_the_message_names_those_that_are(cloud: LocalStack) -> None:
    with pytest.raises(ClientError, match=r"Function not found: nothing \(deployed here: .*test-Echo") as caught:
        cloud.client("lambda").invoke(FunctionName="nothing")

    assert caught.value.response["Error"]["Code"] == "ResourceNotFoundException"


@pytest.mark.parametrize("name", ["test-Obey", "arn:aws:lambda:us-east-1:123456789012:function:test-Obey:$LATEST"])
def test_a_function_is_found_by_name_and_by_arn(cloud: LocalStack, name: str) -> None:
    assert cloud.client("lambda").invoke(FunctionName=name, InvocationType="DryRun")["StatusCode"] == 204


def test_a_payload_that_is_no_json_is_refused(cloud: LocalStack) -> None:
    with pytest.raises(ClientError, match="InvalidRequestContentException"):
        cloud.client("lambda").invoke(FunctionName="test-Echo", Payload=b"{")


def test_a_failed_asynchronous_event_is_retried_and_then_goes_to_the_failure_destination(cloud: LocalStack) -> None:
    accepted = cloud.client("lambda").invoke(FunctionName="test-Fail", InvocationType="Event", Payload=b'{"n": 7}')

    record = json.loads(receive(cloud, "dead-letters")["Body"])

    assert accepted["StatusCode"] == 202
    assert record["requestPayload"] == {"n": 7}
    assert record["requestContext"]["approximateInvokeCount"] == 2
    assert record["requestContext"]["condition"] == "RetriesExhausted"
    assert record["responsePayload"]["errorType"] == "QuotaExceededError"
    assert "test-Fail failed 2 times on an asynchronous event; see its log" in cloud.given_up_events()


def test_calls_of_a_function_are_recorded_under_its_role_and_without_secrets(cloud: LocalStack) -> None:
    invoke(cloud, "Forward", {"x": "body text"})
    receive(cloud, "received")

    calls = [call for call in cloud.calls() if call["operation"] == "SendMessage"]
    assert {"LOCALworker"} <= {call["access_key"] for call in calls}
    members = {"time", "access_key", "service", "operation", "resource", "status", "authorization"}
    assert all(set(call) == members for call in calls)
    text = (cloud.state_dir / "calls.jsonl").read_text()
    assert "local-secret" not in text
    assert "body text" not in text
    assert "Signature" not in text


def receive(cloud: LocalStack, queue: str) -> dict[str, Any]:
    """Take one message off a queue, waiting for it."""
    sqs = cloud.client("sqs")
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    messages = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20, MessageAttributeNames=["All"]).get("Messages")
    assert messages, f"nothing arrived on {queue}"
    sqs.delete_message(QueueUrl=url, ReceiptHandle=messages[0]["ReceiptHandle"])
    message: dict[str, Any] = messages[0]
    return message
