"""Every signed request is recognised as the AWS call that it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from local_stack.edge.authorization import Place
from local_stack.edge.calls import Call, identify
from local_stack.edge.service_models import ModelViolationError, check, service_model

HYPERPOD_ARN = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abc123def456"
PLACE = Place(region="us-east-1", account_id="123456789012", hyperpod_arns={"h": HYPERPOD_ARN})


class _Sent(Exception):  # noqa: N818 - carries the request out of the client
    def __init__(self, request: AWSPreparedRequest) -> None:
        super().__init__()
        self.request = request


def sent(service: str, call: Callable[[Any], Any]) -> Call | None:
    """Let a real client make and sign a call, and identify what it would have sent."""
    client = boto3.session.Session().client(
        service,
        region_name="us-east-1",
        endpoint_url="http://127.0.0.1:1",
        aws_access_key_id="LOCALreader",
        aws_secret_access_key="local-secret",
    )

    def capture(request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        raise _Sent(request)

    client.meta.events.register("before-send", capture)
    with pytest.raises(_Sent) as caught:
        call(client)
    request = caught.value.request
    url = urlsplit(request.url)
    headers = {
        name.lower(): value.decode() if isinstance(value, bytes) else value for name, value in request.headers.items()
    }
    body = request.body or b""
    content = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else body.read()
    return identify(request.method, url.path, url.query, headers, content, PLACE)


TOPIC = "arn:aws:sns:us-east-1:123456789012:topic"
CASES: list[tuple[str, Callable[[Any], Any], str, str | None]] = [
    ("dynamodb", lambda c: c.get_item(TableName="t", Key={"PK": {"S": "a"}}), "GetItem", "t"),
    ("sns", lambda c: c.publish(TopicArn=TOPIC, Message="m"), "Publish", TOPIC),
    ("stepfunctions", lambda c: c.list_executions(stateMachineArn=TOPIC), "ListExecutions", TOPIC),
    ("s3", lambda c: c.list_buckets(), "ListBuckets", None),
    ("s3", lambda c: c.put_object(Bucket="b", Key="k/x", Body=b"1"), "PutObject", "b/k/x"),
    ("s3", lambda c: c.copy_object(Bucket="b", Key="k/x", CopySource="b/y"), "CopyObject", "b/k/x"),
    ("s3", lambda c: c.get_object(Bucket="b", Key="k/x"), "GetObject", "b/k/x"),
    ("s3", lambda c: c.list_objects_v2(Bucket="b"), "ListObjectsV2", "b"),
    ("s3", lambda c: c.delete_objects(Bucket="b", Delete={"Objects": [{"Key": "k"}]}), "DeleteObjects", "b"),
    ("s3", lambda c: c.create_multipart_upload(Bucket="b", Key="k"), "CreateMultipartUpload", "b/k"),
    ("lambda", lambda c: c.invoke(FunctionName="f"), "Invoke", "f"),
    ("eks", lambda c: c.describe_cluster(name="e"), "DescribeCluster", "/clusters/e"),
    ("sagemaker", lambda c: c.list_cluster_nodes(ClusterName="h"), "ListClusterNodes", "h"),
    ("kms", lambda c: c.verify_mac(KeyId="k", Message=b"m", Mac=b"x", MacAlgorithm="HMAC_SHA_256"), "VerifyMac", "k"),
    (
        "events",
        lambda c: c.put_events(Entries=[{"Source": "s", "DetailType": "d", "Detail": "{}", "EventBusName": "bus"}]),
        "PutEvents",
        "bus",
    ),
    ("cloudwatch", lambda c: c.list_metrics(Namespace="n"), "ListMetrics", None),
]


@pytest.mark.parametrize(("service", "call", "operation", "resource"), CASES)
def test_a_call_is_named_as_the_client_names_it(
    service: str, call: Callable[[Any], Any], operation: str, resource: str | None
) -> None:
    found = sent(service, call)

    assert found is not None
    assert (found.access_key, found.operation) == ("LOCALreader", operation)
    if resource is not None:
        assert found.resource == resource


HERE = "us-east-1:123456789012"
ENTRY = {"DetailType": "d", "Detail": "{}", "EventBusName": "bus"}
ASKS: list[tuple[str, Callable[[Any], Any], list[tuple[str, str, dict[str, str]]]]] = [
    (
        "dynamodb",
        lambda c: c.transact_write_items(
            TransactItems=[
                {"Put": {"TableName": "t", "Item": {}}},
                {"Delete": {"TableName": "t", "Key": {}}},
                {"Put": {"TableName": "t", "Item": {"PK": {"S": "b"}}}},
            ]
        ),
        [(f"dynamodb:{action}", f"arn:aws:dynamodb:{HERE}:table/t", {}) for action in ("PutItem", "DeleteItem")],
    ),
    ("s3", lambda c: c.head_object(Bucket="b", Key="k/x"), [("s3:GetObject", "arn:aws:s3:::b/k/x", {})]),
    (
        "s3",
        lambda c: c.list_objects_v2(Bucket="b", Prefix="k/"),
        [("s3:ListBucket", "arn:aws:s3:::b", {"s3:prefix": "k/"})],
    ),
    (
        "s3",
        lambda c: c.delete_objects(Bucket="b", Delete={"Objects": [{"Key": "k/1"}, {"Key": "k/2"}]}),
        [("s3:DeleteObject", f"arn:aws:s3:::b/k/{number}", {}) for number in (1, 2)],
    ),
    (
        "s3",
        lambda c: c.upload_part(Bucket="b", Key="k", UploadId="u", PartNumber=1, Body=b""),
        [("s3:PutObject", "arn:aws:s3:::b/k", {})],
    ),
    (
        "events",
        lambda c: c.put_events(Entries=[{**ENTRY, "Source": "one"}, {**ENTRY, "Source": "two"}]),
        [
            (
                "events:PutEvents",
                f"arn:aws:events:{HERE}:event-bus/bus",
                {"events:source": source, "events:detail-type": "d"},
            )
            for source in ("one", "two")
        ],
    ),
    (
        "kms",
        lambda c: c.generate_mac(KeyId="k", Message=b"m", MacAlgorithm="HMAC_SHA_256"),
        [("kms:GenerateMac", f"arn:aws:kms:{HERE}:key/k", {"kms:MacAlgorithm": "HMAC_SHA_256"})],
    ),
    (
        "sagemaker",
        lambda c: c.batch_replace_cluster_nodes(ClusterName="h", NodeIds=["i-0123456789abcdef0"]),
        [("sagemaker:BatchReplaceClusterNodes", HYPERPOD_ARN, {})],
    ),
    (
        "lambda",
        lambda c: c.invoke(FunctionName="f"),
        [("lambda:InvokeFunction", f"arn:aws:lambda:{HERE}:function:f", {})],
    ),
    ("eks", lambda c: c.describe_cluster(name="e"), [("eks:DescribeCluster", f"arn:aws:eks:{HERE}:cluster/e", {})]),
    (
        "cloudwatch",
        lambda c: c.get_metric_data(MetricDataQueries=[], StartTime=0, EndTime=1),
        [("cloudwatch:GetMetricData", "*", {})],
    ),
    (
        "sqs",
        lambda c: c.send_message(QueueUrl="http://127.0.0.1:1/123456789012/q", MessageBody="m"),
        [("sqs:SendMessage", f"arn:aws:sqs:{HERE}:q", {})],
    ),
    # A token does not tell whose it is.
    ("stepfunctions", lambda c: c.send_task_success(taskToken="t", output="{}"), [("states:SendTaskSuccess", "", {})]),
]


@pytest.mark.parametrize(("service", "call", "asks"), ASKS, ids=[asks[0][0] for _, _, asks in ASKS])
def test_a_call_says_what_it_asks_iam_for(
    service: str, call: Callable[[Any], Any], asks: list[tuple[str, str, dict[str, str]]]
) -> None:
    found = sent(service, call)

    assert found is not None
    assert [(one.action, one.resource, dict(one.context)) for one in found.authorization] == asks


def test_a_presigned_url_is_a_call_too() -> None:
    client = boto3.session.Session().client(
        "s3",
        region_name="us-east-1",
        endpoint_url="http://127.0.0.1:1",
        aws_access_key_id="LOCALreader",
        aws_secret_access_key="local-secret",
        config=boto3.session.Config(signature_version="s3v4"),
    )
    url = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": "b", "Key": "k"}))

    found = identify("GET", url.path, url.query, {}, b"")

    assert found == Call(access_key="LOCALreader", service="s3", operation="GetObject", resource="b/k")


def test_an_unsigned_request_is_none() -> None:
    assert identify("GET", "/incidents/inc-1", "signature=x", {"host": "127.0.0.1"}, b"") is None


NODES = service_model("sagemaker").operation_model("BatchReplaceClusterNodes")


def test_a_message_that_the_model_allows_passes() -> None:
    check(NODES.input_shape, {"ClusterName": "h", "NodeIds": ["i-0123456789abcdef0"]})
    check(NODES.output_shape, {"Successful": ["i-0123456789abcdef0"], "Failed": []})


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({}, "ClusterName"),
        ({"ClusterName": "h", "NodeIds": "i-0"}, "NodeIds"),
        ({"ClusterName": "h", "Nodes": []}, "Unknown member: Nodes"),
    ],
)
def test_a_message_that_the_model_refuses_is_named(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelViolationError, match=problem):
        check(NODES.input_shape, json.loads(json.dumps(message)))
