"""One running cloud with a few small functions, for all tests of this directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from local_stack import LocalStack
from tests.adapters.local_cloud.assembly import function, write_assembly

CODE = '''
import json, os, time
import boto3

class QuotaExceededError(Exception):
    pass

def echo(event, context):
    return {
        "event": event,
        "request_id": context.aws_request_id,
        "remaining_ms": context.get_remaining_time_in_millis(),
        "arn": context.invoked_function_arn,
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "directory": os.getcwd(),
    }

def fail(event, context):
    raise QuotaExceededError("no quota left")

def obey(event, context):
    """Do what the event says."""
    if "sleep" in event:
        time.sleep(event["sleep"])
    if "exit" in event:
        os._exit(event["exit"])
    return os.getpid()

def forward(event, context):
    """Put the event on the queue, as a function would call any service."""
    sqs = boto3.client("sqs")
    sqs.send_message(QueueUrl=sqs.get_queue_url(QueueName="received")["QueueUrl"], MessageBody=json.dumps(event))

def page(event, context):
    return {
        "statusCode": 201,
        "headers": {"Content-Type": "text/html; charset=utf-8", "X-Seen": event["rawQueryString"]},
        "cookies": ["a=1", "b=2"],
        "body": json.dumps(event),
    }

def boom(event, context):
    raise RuntimeError("secret detail")
'''


def _queue(name: str) -> dict[str, Any]:
    return {"Type": "AWS::SQS::Queue", "Properties": {"QueueName": name}}


def _rule(arn: Any, detail_type: str, target: Mapping[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "Type": "AWS::Events::Rule",
        "Properties": {
            "EventBusName": {"Ref": "Bus"},
            "EventPattern": {"source": ["test"], "detail-type": [detail_type]},
            "Targets": [{"Id": "Target", "Arn": arn, **(target or {})}],
            **properties,
        },
    }


def _route(key: str, integration: str) -> dict[str, Any]:
    target = {"Fn::Join": ["", ["integrations/", {"Ref": integration}]]}
    return {
        "Type": "AWS::ApiGatewayV2::Route",
        "Properties": {"ApiId": {"Ref": "Api"}, "RouteKey": key, "Target": target},
    }


def _integration(of: str) -> dict[str, Any]:
    return {
        "Type": "AWS::ApiGatewayV2::Integration",
        "Properties": {"ApiId": {"Ref": "Api"}, "IntegrationUri": {"Fn::GetAtt": [of, "Arn"]}},
    }


MISSING = "arn:aws:lambda:us-east-1:123456789012:function:missing"
PASS_MACHINE = '{"StartAt": "Only", "States": {"Only": {"Type": "Pass", "End": true}}}'
ENDING_MACHINE = json.dumps(
    {
        "QueryLanguage": "JSONata",
        "StartAt": "Which",
        "States": {
            "Which": {
                "Type": "Choice",
                "Choices": [{"Condition": "{% $states.input.fail %}", "Next": "Fail"}],
                "Default": "Wait",
            },
            "Fail": {"Type": "Fail", "Error": "Quota", "Cause": "used up"},
            "Wait": {"Type": "Wait", "Seconds": 30000, "End": True},
        },
    }
)
"""Fails, or waits to be stopped."""
RESOURCES = {
    "Echo": function("code.echo", Environment={"Variables": {"TOPIC": {"Ref": "Topic"}}}, Timeout=20),
    "Fail": function("code.fail"),
    "Obey": function("code.obey", Timeout=1),
    "Broken": function("absent.handler"),
    "Forward": function("code.forward", Timeout=20),
    "Page": function("code.page", Timeout=20),
    "Boom": function("code.boom", Timeout=20),
    "Received": _queue("received"),
    "DeadLetters": _queue("dead-letters"),
    "FailedEvents": {
        "Type": "AWS::Lambda::EventInvokeConfig",
        "Properties": {
            "FunctionName": {"Ref": "Fail"},
            "Qualifier": "$LATEST",
            "MaximumRetryAttempts": 1,
            "DestinationConfig": {"OnFailure": {"Destination": {"Fn::GetAtt": ["DeadLetters", "Arn"]}}},
        },
    },
    "Bus": {"Type": "AWS::Events::EventBus", "Properties": {"Name": "bus"}},
    "Topic": {"Type": "AWS::SNS::Topic"},
    "ForwardRule": _rule({"Fn::GetAtt": ["Forward", "Arn"]}, "Forward"),
    "DisabledRule": _rule({"Fn::GetAtt": ["Forward", "Arn"]}, "Disabled", State="DISABLED"),
    "MissingRule": _rule(
        MISSING, "Missing", target={"DeadLetterConfig": {"Arn": {"Fn::GetAtt": ["DeadLetters", "Arn"]}}}
    ),
    "EndRule": {
        "Type": "AWS::Events::Rule",
        "Properties": {
            "EventPattern": {
                "source": ["aws.states"],
                "detail-type": ["Step Functions Execution Status Change"],
                "detail": {"status": ["FAILED", "ABORTED"], "stateMachineArn": [{"Ref": "Ending"}]},
            },
            "Targets": [{"Id": "Target", "Arn": {"Fn::GetAtt": ["Forward", "Arn"]}}],
        },
    },
    "Ending": {
        "Type": "AWS::StepFunctions::StateMachine",
        "Properties": {"RoleArn": {"Fn::GetAtt": ["Role", "Arn"]}, "DefinitionString": ENDING_MACHINE},
    },
    "MachineRule": _rule({"Ref": "Machine"}, "Start"),
    "Machine": {
        "Type": "AWS::StepFunctions::StateMachine",
        "Properties": {"RoleArn": {"Fn::GetAtt": ["Role", "Arn"]}, "DefinitionString": PASS_MACHINE},
    },
    "Key": {"Type": "AWS::KMS::Key", "Properties": {"KeySpec": "HMAC_256", "KeyUsage": "GENERATE_VERIFY_MAC"}},
    "Api": {"Type": "AWS::ApiGatewayV2::Api", "Properties": {"Name": "api", "ProtocolType": "HTTP"}},
    "PageIntegration": _integration("Page"),
    "BoomIntegration": _integration("Boom"),
    "PageRoute": _route("GET /pages/{page_id}", "PageIntegration"),
    "FormRoute": _route("POST /pages/{page_id}/form", "PageIntegration"),
    "BoomRoute": _route("GET /boom", "BoomIntegration"),
}
OUTPUTS = {
    "ApiUrl": {"Fn::GetAtt": ["Api", "ApiEndpoint"]},
    "KeyId": {"Ref": "Key"},
    "EndingArn": {"Ref": "Ending"},
    "MachineArn": {"Ref": "Machine"},
    "TopicArn": {"Ref": "Topic"},
}


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("cloud")
    assembly = write_assembly(directory / "cdk.out", RESOURCES, outputs=OUTPUTS, code={"code.py": CODE})
    with LocalStack(directory / "state", assembly, cluster=None, time_scale=0.01) as stack:
        yield stack
