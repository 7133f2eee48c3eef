"""Events reach their targets as EventBridge delivers them, and the other services' answers are AWS's."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError

from local_stack import LocalStack
from tests.adapters.local_cloud.conftest import MISSING
from tests.adapters.local_cloud.test_functions import receive


def put(cloud: LocalStack, detail_type: str, detail: dict[str, Any]) -> str:
    """Put one event; returns its id."""
    entry = {"Source": "test", "DetailType": detail_type, "Detail": json.dumps(detail), "EventBusName": "bus"}
    answer = cloud.client("events").put_events(Entries=[entry])
    assert answer["FailedEntryCount"] == 0
    event_id: str = answer["Entries"][0]["EventId"]
    return event_id


def test_a_function_target_receives_the_whole_event_with_an_iso_time_and_the_account(cloud: LocalStack) -> None:
    event_id = put(cloud, "Forward", {"step": 5})

    event = json.loads(receive(cloud, "received")["Body"])

    assert event["id"] == event_id
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event["time"])
    assert set(event) == {"version", "id", "detail-type", "source", "account", "time", "region", "resources", "detail"}
    assert (event["account"], event["detail"], event["source"]) == ("123456789012", {"step": 5}, "test")


def test_a_state_machine_target_is_started_with_the_event(cloud: LocalStack) -> None:
    event_id = put(cloud, "Start", {"step": 6})
    client = cloud.client("stepfunctions")
    arn = cloud.outputs["MachineArn"].replace(":stateMachine:", ":execution:") + f":{event_id}"
    deadline = time.monotonic() + 20
    while True:
        try:
            execution = client.describe_execution(executionArn=arn)
            break
        except client.exceptions.ExecutionDoesNotExist:
            assert time.monotonic() < deadline, "the execution was not started"
            time.sleep(0.05)

    assert json.loads(execution["input"])["detail"] == {"step": 6}


def test_the_default_bus_is_told_how_an_execution_ended(cloud: LocalStack) -> None:
    client, arn = cloud.client("stepfunctions"), cloud.outputs["EndingArn"]
    ended = {
        "stopped": client.start_execution(stateMachineArn=arn, name="stopped", input='{"fail": false}'),
        "failed": client.start_execution(stateMachineArn=arn, name="failed", input='{"fail": true}'),
    }
    seen = [json.loads(receive(cloud, "received")["Body"])]
    client.stop_execution(executionArn=ended["stopped"]["executionArn"], error="Operator", cause="not needed")
    seen.append(json.loads(receive(cloud, "received")["Body"]))

    assert [event["source"] for event in seen] == ["aws.states"] * 2
    assert [event["resources"] for event in seen] == [[ended[name]["executionArn"]] for name in ("failed", "stopped")]
    kept = ("status", "name", "error", "cause", "stateMachineArn", "input")
    assert [[event["detail"][name] for name in kept] for event in seen] == [
        ["FAILED", "failed", "Quota", "used up", arn, '{"fail": true}'],
        ["ABORTED", "stopped", "Operator", "not needed", arn, '{"fail": false}'],
    ]
    described = client.describe_execution(executionArn=ended["stopped"]["executionArn"])
    assert seen[1]["detail"]["stopDate"] == int(described["stopDate"].timestamp() * 1000)


def test_a_target_that_does_not_exist_sends_the_event_to_the_dead_letter_queue(cloud: LocalStack) -> None:
    put(cloud, "Missing", {"step": 7})

    message = receive(cloud, "dead-letters")

    assert json.loads(message["Body"])["detail"] == {"step": 7}
    attributes = {name: value["StringValue"] for name, value in message["MessageAttributes"].items()}
    assert attributes["TARGET_ARN"] == MISSING
    assert attributes["ERROR_CODE"] == "ResourceNotFoundException"
    assert attributes["RULE_ARN"].endswith("MissingRule")


def test_a_disabled_rule_delivers_nothing(cloud: LocalStack) -> None:
    put(cloud, "Disabled", {"step": 8})
    put(cloud, "Forward", {"step": 9})

    assert json.loads(receive(cloud, "received")["Body"])["detail"] == {"step": 9}


def test_subscribers_receive_what_is_published(cloud: LocalStack) -> None:
    cloud.client("sns").publish(TopicArn=cloud.outputs["TopicArn"], Subject="Approve?", Message="line 1\nline 2")

    message = cloud.sns_messages()[-1]
    assert (message["Type"], message["Subject"], message["Message"]) == ("Notification", "Approve?", "line 1\nline 2")


def test_a_mac_is_verified_and_a_wrong_one_refused(cloud: LocalStack) -> None:
    kms = cloud.client("kms")
    request = {"KeyId": cloud.outputs["KeyId"], "Message": b"inc-1\ndecide\n17", "MacAlgorithm": "HMAC_SHA_256"}
    mac = kms.generate_mac(**request)["Mac"]

    assert kms.verify_mac(**request, Mac=mac)["MacValid"] is True
    with pytest.raises(kms.exceptions.KMSInvalidMacException):
        kms.verify_mac(**(request | {"Message": b"inc-2\ndecide\n17"}), Mac=mac)


def test_a_key_takes_only_the_algorithm_of_its_spec(cloud: LocalStack) -> None:
    with pytest.raises(ClientError, match="InvalidKeyUsageException"):
        cloud.client("kms").generate_mac(KeyId=cloud.outputs["KeyId"], Message=b"x", MacAlgorithm="HMAC_SHA_512")


def test_objects_survive_the_way_through_the_edge_unchanged(cloud: LocalStack) -> None:
    s3 = cloud.client("s3")
    body = bytes(range(256)) * 4096
    s3.create_bucket(Bucket="objects")

    s3.put_object(Bucket="objects", Key="a folder/ü+%.bin", Body=body, Metadata={"step": "19"})

    head = s3.head_object(Bucket="objects", Key="a folder/ü+%.bin")
    assert (head["ContentLength"], head["Metadata"]) == (len(body), {"step": "19"})
    assert s3.get_object(Bucket="objects", Key="a folder/ü+%.bin")["Body"].read() == body
    with pytest.raises(ClientError, match="NoSuchKey"):
        s3.get_object(Bucket="objects", Key="missing")


def test_hyperpod_and_eks_calls_without_a_cluster_say_so(cloud: LocalStack) -> None:
    with pytest.raises(ClientError, match="started without a cluster server"):
        cloud.client("eks").describe_cluster(name="any")
