"""Each function may do what its handler does, on the resources it does it to, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.catalogue import FUNCTIONS, WORKFLOW_FUNCTIONS

from .conftest import FIRST_CLUSTER, SECOND_CLUSTER, Template, as_list

RESEARCH, TEAM_A, SECOND = (
    f"TrainingPolicyArn{name}" for name in ("Abc123def456Research", "Abc123def456TeamXa", "Zzz999zzz999Research")
)
"""Outputs with the training policies of two clusters."""

# What AWS offers no resource-level permission for.
WITHOUT_RESOURCES = {
    "xray:PutTraceSegments",
    "xray:PutTelemetryRecords",
    "cloudwatch:GetMetricData",
    "ec2:CreateNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DeleteNetworkInterface",
}
FOLDERS = [spec.folder for spec in FUNCTIONS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_may_act_on_every_resource(folder: str, template: Template) -> None:
    statements = template.function_statements(folder)
    assert statements
    for statement in statements:
        assert statement["Effect"] == "Allow"
        assert not [action for action in statement["Action"] if "*" in action]
        if "*" in statement["Resource"]:
            assert set(statement["Action"]) <= WITHOUT_RESOURCES


def test_every_function_has_a_role_of_its_own(template: Template) -> None:
    roles = [json.dumps(properties["Role"]) for properties in template.functions.values()]
    assert len(set(roles)) == len(roles) == len(FUNCTIONS)


HELD_BY: list[tuple[str, set[str]]] = [
    ("sagemaker:BatchReplaceClusterNodes", {"replace_node"}),
    ("sagemaker:StartClusterHealthCheck", {"start_health_check", "settle_health_check"}),
    ("kms:GenerateMac", {"request_approval", "escalate", "notice_end", "decide_approval", "show_console"}),
    ("kms:VerifyMac", {"decide_approval", "settle_health_check", "replace_node", "release_node", "show_console"}),
    ("states:StartExecution", {"receive_alarm", "decide_approval", "notice_end"}),
    ("states:DescribeExecution", {"decide_approval", "notice_end", "open_incident"}),
    ("states:ListExecutions", {"notice_end"}),
    ("cloudwatch:GetMetricData", {"snapshot_evidence"}),
]


@pytest.mark.parametrize(("action", "folders"), HELD_BY)
def test_a_consequential_action_is_held_by_few(action: str, folders: set[str], template: Template) -> None:
    assert {folder for folder in FOLDERS if action in template.actions(folder)} == folders


def test_among_the_checkpoints_the_recovery_writes_revocations_and_nothing_else(template: Template) -> None:
    for folder in FOLDERS:
        for statement in template.function_statements(folder):
            if "s3:PutObject" in statement["Action"]:
                named = [arn for arn in statement["Resource"] if isinstance(arn, str)]
                assert named == (
                    ["arn:aws:s3:::example-checkpoints/llama/*/revoked.json"] if folder == "choose_checkpoint" else []
                )


def test_signatures_are_made_and_checked_with_one_algorithm(template: Template) -> None:
    for folder in ("request_approval", "escalate", "decide_approval", "replace_node", "show_console"):
        statements = [one for one in template.function_statements(folder) if "Mac" in one["Action"][0]]
        assert statements
        for statement in statements:
            assert statement["Condition"] == {"StringEquals": {"kms:MacAlgorithm": "HMAC_SHA_256"}}


def test_what_shows_the_console_can_write_nothing(template: Template) -> None:
    reading = {"dynamodb:GetItem", "dynamodb:Query", "kms:GenerateMac", "kms:VerifyMac"}
    logging = {"logs:CreateLogStream", "logs:PutLogEvents", "xray:PutTraceSegments", "xray:PutTelemetryRecords"}
    assert set(template.actions("show_console")) == reading | logging


@pytest.mark.parametrize(("name", "functions"), [("recovery", len(WORKFLOW_FUNCTIONS)), ("approve", 1)])
def test_a_workflow_may_invoke_its_own_functions_only(name: str, functions: int, template: Template) -> None:
    machine = template.state_machine(name)
    statements = template.statements(machine["RoleArn"]["Fn::GetAtt"][0])
    (invoke,) = [one for one in statements if "lambda:InvokeFunction" in one["Action"]]
    arns = {json.dumps(arn) for arn in invoke["Resource"]}
    assert arns == {json.dumps(arn) for arn in machine["DefinitionSubstitutions"].values()}
    assert len(arns) == functions


def test_services_may_invoke_a_function_only_for_their_own_resource_here(template: Template) -> None:
    permissions = template.of_type("AWS::Lambda::Permission").values()
    assert {permission["Principal"] for permission in permissions} == {
        "events.amazonaws.com",
        "apigateway.amazonaws.com",
    }
    assert all("SourceArn" in permission for permission in permissions)


def training_statements(template: Template) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = template.only("AWS::IAM::ManagedPolicy")["PolicyDocument"]["Statement"]
    return found


def test_a_training_pod_may_put_events_on_this_bus_and_in_its_own_name_only(everything: Template) -> None:
    (bus,) = everything.of_type("AWS::Events::EventBus")
    sources = {RESEARCH: "abc123def456.research", TEAM_A: "abc123def456.team-a", SECOND: "zzz999zzz999.research"}
    outputs = everything.document["Outputs"]
    assert {name for name in outputs if name.startswith("TrainingPolicyArn")} == set(sources)
    for output, source in sources.items():
        policy = everything.resources[outputs[output]["Value"]["Ref"]]["Properties"]["PolicyDocument"]
        (statement,) = [one for one in policy["Statement"] if "events:PutEvents" in as_list(one["Action"])]
        assert statement["Resource"] == {"Fn::GetAtt": [bus, "Arn"]}
        assert statement["Condition"] == {"StringEquals": {"events:source": f"truestep.training.{source}"}}


def test_two_namespaces_whose_names_differ_by_a_dash_have_policies_of_their_own(
    synthesised: Callable[..., Template],
) -> None:
    names = ["team-a", "teama", "team--a"]
    template = synthesised(clusters=[{**FIRST_CLUSTER, "training_namespaces": names}])
    policies = template.of_type("AWS::IAM::ManagedPolicy").values()
    sources = [one["PolicyDocument"]["Statement"][0]["Condition"]["StringEquals"]["events:source"] for one in policies]
    assert sorted(source.rpartition(".")[2] for source in sources) == sorted(names)
    assert len({one for one in template.document["Outputs"] if one.startswith("TrainingPolicyArn")}) == len(names)


def test_a_training_pod_cannot_take_a_revocation_back(template: Template) -> None:
    (denied,) = [one for one in training_statements(template) if one["Effect"] == "Deny"]
    assert denied["Resource"] == "arn:aws:s3:::example-checkpoints/llama/*/revoked.json"
    assert {"s3:PutObject", "s3:DeleteObject"} <= set(denied["Action"])


def test_a_training_pod_lists_its_prefix_only(template: Template) -> None:
    (listing,) = [one for one in training_statements(template) if as_list(one["Action"]) == ["s3:ListBucket"]]
    assert listing["Resource"] == "arn:aws:s3:::example-checkpoints"
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["llama", "llama/*"]}}


def test_a_training_pod_of_one_cluster_cannot_touch_the_checkpoints_of_another(
    synthesised: Callable[..., Template],
) -> None:
    own, other = "own-bucket/runs", "other-bucket/runs"
    clusters = [{**FIRST_CLUSTER, "checkpoint_buckets": [own]}, {**SECOND_CLUSTER, "checkpoint_buckets": [other]}]
    template = synthesised(clusters=clusters)
    outputs = template.document["Outputs"]
    for output, its, theirs in ((RESEARCH, own, other), (SECOND, other, own)):
        policy = json.dumps(template.resources[outputs[output]["Value"]["Ref"]])
        assert its in policy
        assert theirs.split("/")[0] not in policy


def test_without_buckets_nobody_is_given_any(adopting: Template) -> None:
    assert [as_list(one["Action"]) for one in training_statements(adopting)] == [["events:PutEvents"]]
    assert not [action for action in adopting.actions("choose_checkpoint") if action.startswith("s3:")]
