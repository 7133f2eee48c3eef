"""What is deployed keeps alarms from being lost, secrets from being seen and data from being deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.catalogue import FUNCTIONS, Access
from lambdas.settings import CONSOLE_KEY_ID, DECISION_KEY_ID, HMAC_KEY_ID
from truestep.contract.events import DetailType

from .conftest import CLUSTER_ARN, EXISTING_KEY, EXISTING_TOPIC, SECOND_CLUSTER, Template, as_list

KUBERNETES_FOLDERS = {spec.folder for spec in FUNCTIONS if Access.KUBERNETES in spec.access}


def test_what_is_remembered_survives_the_stack(template: Template) -> None:
    kept = {
        name: item["DeletionPolicy"]
        for name, item in template.resources.items()
        if item["Type"] in ("AWS::DynamoDB::Table", "AWS::S3::Bucket", "AWS::KMS::Key")
    }
    assert len(kept) == 6
    assert set(kept.values()) == {"Retain"}
    assert template.only("AWS::DynamoDB::Table")["DeletionProtectionEnabled"] is True


def test_a_stage_without_protection_goes_as_a_whole(adopting: Template) -> None:
    policies = {item.get("DeletionPolicy") for item in adopting.resources.values()}
    assert "Retain" not in policies
    assert adopting.only("AWS::DynamoDB::Table")["DeletionProtectionEnabled"] is False


def test_the_table_has_the_contracts_keys_and_can_be_restored(template: Template) -> None:
    table = template.only("AWS::DynamoDB::Table")
    assert [(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]] == [("PK", "HASH"), ("SK", "RANGE")]
    assert {definition["AttributeType"] for definition in table["AttributeDefinitions"]} == {"S"}
    assert table["BillingMode"] == "PAY_PER_REQUEST"
    assert table["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert table["SSESpecification"] == {"SSEEnabled": True}


def test_incidents_and_jobs_can_be_listed_without_reading_the_table(template: Template) -> None:
    (index,) = template.only("AWS::DynamoDB::Table")["GlobalSecondaryIndexes"]
    assert [(key["AttributeName"], key["KeyType"]) for key in index["KeySchema"]] == [
        ("listed", "HASH"),
        ("listed_at", "RANGE"),
    ]
    # An incident's document is up to 400 KB: the index must not hold it a second time.
    assert index["Projection"] == {"ProjectionType": "INCLUDE", "NonKeyAttributes": ["status", "job_key"]}


def test_evidence_is_versioned_encrypted_and_never_plain_on_the_wire(template: Template) -> None:
    bucket = template.only("AWS::S3::Bucket")
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
    (expiry,) = bucket["LifecycleConfiguration"]["Rules"]
    assert expiry["NoncurrentVersionExpiration"] == {"NoncurrentDays": 90}
    assert "ExpirationInDays" not in expiry, "evidence itself is kept"
    (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    statements = template.only("AWS::S3::BucketPolicy")["PolicyDocument"]["Statement"]
    denied = [one["Condition"] for one in statements if one["Effect"] == "Deny"]
    assert {"Bool": {"aws:SecureTransport": "false"}} in denied


def test_links_and_decisions_are_signed_with_keys_that_can_do_nothing_else(template: Template) -> None:
    keys = template.of_type("AWS::KMS::Key")
    told = [
        template.functions[folder]["Environment"]["Variables"][name]["Ref"]
        for folder, name in (
            ("request_approval", HMAC_KEY_ID),
            ("decide_approval", DECISION_KEY_ID),
            ("show_console", CONSOLE_KEY_ID),
        )
    ]
    assert len(set(told)) == len(told), "what is good for one thing must not be for another"
    assert {keys[name]["KeySpec"] for name in told} == {"HMAC_256"}
    assert {keys[name]["KeyUsage"] for name in told} == {"GENERATE_VERIFY_MAC"}


SIGNING = [
    (
        HMAC_KEY_ID,
        {
            "kms:GenerateMac": ["notice_end", "request_approval", "escalate"],
            "kms:VerifyMac": ["decide_approval"],
        },
    ),
    (
        DECISION_KEY_ID,
        {
            "kms:GenerateMac": ["decide_approval"],
            "kms:VerifyMac": ["settle_health_check", "replace_node", "release_node"],
        },
    ),
    (CONSOLE_KEY_ID, {"kms:GenerateMac": ["show_console"], "kms:VerifyMac": ["show_console"]}),
]


@pytest.mark.parametrize(("variable", "holders"), SIGNING)
def test_nobody_but_the_functions_that_do_can_sign_or_check(
    template: Template, variable: str, holders: dict[str, list[str]]
) -> None:
    folder = holders["kms:VerifyMac"][0]
    name = template.functions[folder]["Environment"]["Variables"][variable]["Ref"]
    key = template.of_type("AWS::KMS::Key")[name]
    denied = [one for one in key["KeyPolicy"]["Statement"] if one["Effect"] == "Deny"]
    denials = {action: one for one in denied for action in as_list(one["Action"])}
    assert denials.keys() == holders.keys()
    for action, folders in holders.items():
        assert denials[action]["Principal"] == {"AWS": "*"}
        excepted = as_list(denials[action]["Condition"]["ArnNotEquals"]["aws:PrincipalArn"])
        assert excepted == [template.functions[folder]["Role"] for folder in folders]
        granted = {
            folder
            for folder in template.functions
            for one in template.function_statements(folder)
            if action in one["Action"] and {"Fn::GetAtt": [name, "Arn"]} in as_list(one["Resource"])
        }
        assert granted == set(folders)


def _rules_of_training(template: Template) -> list[dict[str, Any]]:
    return [rule for rule in template.of_type("AWS::Events::Rule").values() if "EventBusName" in rule]


def test_every_event_of_training_has_one_rule(template: Template) -> None:
    rules = _rules_of_training(template)
    kinds = [kind for rule in rules for kind in rule["EventPattern"]["detail-type"]]
    assert sorted(kinds) == sorted(DetailType)
    targets = {
        kind: rule["Targets"][0]["Arn"]["Fn::GetAtt"][0]
        for rule in rules
        for kind in rule["EventPattern"]["detail-type"]
    }
    assert "ReceiveAlarm" in json.dumps(targets[DetailType.ALARM])
    assert "RecordTrainingEvent" in json.dumps(targets[DetailType.VERIFIED])


def test_an_early_end_of_the_recoverys_executions_is_heard_on_the_default_bus(template: Template) -> None:
    (rule,) = [rule for rule in template.of_type("AWS::Events::Rule").values() if "EventBusName" not in rule]
    pattern = rule["EventPattern"]
    assert pattern["source"] == ["aws.states"]
    assert pattern["detail-type"] == ["Step Functions Execution Status Change"]
    assert pattern["detail"]["status"] == ["FAILED", "TIMED_OUT", "ABORTED"]
    (machine,) = (one["Ref"] for one in pattern["detail"]["stateMachineArn"])
    assert template.of_type("AWS::StepFunctions::StateMachine")[machine] == template.state_machine("recovery")
    assert "NoticeEnd" in json.dumps(rule["Targets"])


def test_an_event_that_nobody_could_take_ends_in_the_dead_letter_queue(template: Template) -> None:
    (queue,) = template.of_type("AWS::SQS::Queue")
    arn = {"Fn::GetAtt": [queue, "Arn"]}
    for rule in template.of_type("AWS::Events::Rule").values():
        (target,) = rule["Targets"]
        assert target["DeadLetterConfig"] == {"Arn": arn}
        assert target["RetryPolicy"]["MaximumEventAgeInSeconds"] == 6 * 3600
    configured = template.of_type("AWS::Lambda::EventInvokeConfig").values()
    assert {json.dumps(one["DestinationConfig"]) for one in configured} == {
        json.dumps({"OnFailure": {"Destination": arn}})
    }
    assert len(configured) == 3
    for folder in ("receive_alarm", "record_training_event", "notice_end"):
        assert "sqs:SendMessage" in template.actions(folder)


def test_cloudwatch_can_publish_to_the_encrypted_topic(template: Template) -> None:
    key = template.of_type("AWS::KMS::Key")[template.only("AWS::SNS::Topic")["KmsMasterKeyId"]["Fn::GetAtt"][0]]
    principals = [one["Principal"] for one in key["KeyPolicy"]["Statement"]]
    assert {"Service": "cloudwatch.amazonaws.com"} in principals
    statements = template.only("AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"]
    (allowed,) = [one for one in statements if one["Effect"] == "Allow"]
    assert (allowed["Principal"], allowed["Action"]) == ({"Service": "cloudwatch.amazonaws.com"}, "sns:Publish")
    assert allowed["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}
    assert ":alarm:truestep-prod-*" in json.dumps(allowed["Condition"]["ArnLike"]["aws:SourceArn"])
    assert any(one["Effect"] == "Deny" for one in statements), "plain connections"


def test_only_accounts_that_are_named_may_put_events_and_only_trainings(everything: Template) -> None:
    policies = [one["Statement"] for one in everything.of_type("AWS::Events::EventBusPolicy").values()]
    assert len(policies) == 2
    assert "444455556666" in json.dumps(policies)
    for policy in policies:
        assert policy["Action"] == "events:PutEvents"
        assert policy["Principal"] != "*"
        assert policy["Condition"] == {
            "StringEquals": {
                "events:source": [
                    "truestep.training.abc123def456.research",
                    "truestep.training.abc123def456.team-a",
                    "truestep.training.zzz999zzz999.research",
                ]
            }
        }


def test_an_event_in_a_wrong_name_reaches_a_function_that_refuses_it_loudly(template: Template) -> None:
    for rule in _rules_of_training(template):
        assert rule["EventPattern"]["source"] == [{"prefix": "truestep.training"}]


def test_access_logs_cannot_hold_a_links_signature(template: Template) -> None:
    stage = template.only("AWS::ApiGatewayV2::Stage")
    fields = json.loads(stage["AccessLogSettings"]["Format"]).values()
    assert "$context.routeKey" in fields
    leaking = ("query", "header", "requestOverride", "domain", "authorizer")
    assert not [field for field in fields if any(word.lower() in field.lower() for word in leaking)]


def test_the_api_is_throttled_and_has_these_routes(template: Template) -> None:
    limits = template.only("AWS::ApiGatewayV2::Stage")["DefaultRouteSettings"]
    assert 0 < limits["ThrottlingRateLimit"] <= limits["ThrottlingBurstLimit"] <= 20
    assert {route["RouteKey"] for route in template.of_type("AWS::ApiGatewayV2::Route").values()} == {
        "GET /incidents/{incident_id}",
        "GET /incidents/{incident_id}/charts/{name}",
        "POST /incidents/{incident_id}/decision",
        "GET /console",
    }
    integrations = json.dumps(list(template.of_type("AWS::ApiGatewayV2::Integration").values()))
    assert "DecideApproval" in integrations
    assert "ShowConsole" in integrations


@pytest.mark.parametrize("name", ["recovery", "approve"])
def test_a_workflow_logs_transitions_without_the_tokens_in_its_data(name: str, template: Template) -> None:
    assert template.state_machine(name)["TracingConfiguration"] == {"Enabled": True}
    logging = template.state_machine(name)["LoggingConfiguration"]
    assert logging["Level"] == "ALL"
    assert logging["IncludeExecutionData"] is False


def test_every_log_group_ends_and_every_function_has_its_own(template: Template) -> None:
    groups = template.of_type("AWS::Logs::LogGroup").values()
    assert all(group["RetentionInDays"] == 365 for group in groups)
    own = [json.dumps(properties["LoggingConfig"]["LogGroup"]) for properties in template.functions.values()]
    assert len(set(own)) == len(FUNCTIONS)


def test_functions_run_traced_on_graviton_with_the_layer(template: Template) -> None:
    for properties in template.functions.values():
        assert properties["Runtime"] == "python3.13"
        assert properties["Architectures"] == ["arm64"]
        assert properties["TracingConfig"] == {"Mode": "Active"}
        assert len(properties["Layers"]) == 1


def test_every_cluster_admits_the_functions_that_call_it_and_no_others(everything: Template) -> None:
    entries = everything.of_type("AWS::EKS::AccessEntry").values()
    roles = {everything.functions[folder]["Role"]["Fn::GetAtt"][0] for folder in KUBERNETES_FOLDERS}
    for name in ("training-eks", "second-eks"):
        admitted = {one["PrincipalArn"]["Fn::GetAtt"][0] for one in entries if one["ClusterName"] == name}
        assert admitted == roles
    groups = {everything.functions[spec.folder]["Role"]["Fn::GetAtt"][0]: sorted(spec.groups) for spec in FUNCTIONS}
    for entry in entries:
        assert entry["KubernetesGroups"] == groups[entry["PrincipalArn"]["Fn::GetAtt"][0]]
    assert not [entry for entry in entries if entry.get("AccessPolicies")]


def test_permissions_name_every_cluster(everything: Template) -> None:
    (replace,) = [
        one
        for one in everything.function_statements("replace_node")
        if "sagemaker:BatchReplaceClusterNodes" in one["Action"]
    ]
    assert replace["Resource"] == [CLUSTER_ARN, SECOND_CLUSTER["hyperpod_cluster_arn"]]


def test_an_existing_bus_and_topic_are_used_and_not_made(adopting: Template) -> None:
    assert not adopting.of_type("AWS::Events::EventBus")
    assert not adopting.of_type("AWS::Events::EventBusPolicy")
    assert not adopting.of_type("AWS::SNS::Topic")
    assert {rule["EventBusName"] for rule in _rules_of_training(adopting)} == {"shared"}
    resources = [arn for one in adopting.function_statements("escalate") for arn in one["Resource"]]
    assert {EXISTING_TOPIC, EXISTING_KEY} <= {arn for arn in resources if isinstance(arn, str)}


def test_with_a_private_endpoint_only_functions_that_need_the_cluster_run_in_its_network(everything: Template) -> None:
    inside = {folder for folder, properties in everything.functions.items() if "VpcConfig" in properties}
    assert inside == KUBERNETES_FOLDERS
    attaching = {
        folder for folder in everything.functions if "ec2:CreateNetworkInterface" in everything.actions(folder)
    }
    assert attaching == inside


def test_approvers_are_subscribed(everything: Template) -> None:
    subscription = everything.only("AWS::SNS::Subscription")
    assert (subscription["Protocol"], subscription["Endpoint"]) == ("email", "oncall@example.com")


@pytest.mark.parametrize(
    "output",
    [
        "EventBusName",
        "EventBusArn",
        "TableName",
        "StateMachineArn",
        "ApproveStateMachineArn",
        "ApprovalUrl",
        "ApprovalApiUrl",
        "ClusterArns",
        "TopicArn",
        "EvidenceBucketName",
        "TrainingSources",
        "TrainingPolicyArnAbc123def456Research",
    ],
)
def test_what_others_need_is_an_output(output: str, template: Template) -> None:
    assert template.document["Outputs"][output]["Value"]
