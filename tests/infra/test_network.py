"""Several clusters, a private endpoint, an existing VPC, topic and bus: from a context file alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import app
from infra.catalogue import FUNCTIONS, Access
from infra.configuration import (
    ApprovalDomainSettings,
    ClusterSettings,
    DeploymentSettings,
    NetworkSettings,
    parse_settings,
)
from infra.errors import ConfigurationError

from .conftest import EXISTING_KEY, EXISTING_TOPIC, FIRST_CLUSTER, SECOND_CLUSTER, Template

WORKSPACE = "arn:aws:aps:us-west-2:111122223333:workspace/ws-1a2b3c"
CERTIFICATE = "arn:aws:acm:us-west-2:111122223333:certificate/11112222-3333-4444-5555-666677778888"
CONTEXT: dict[str, Any] = {
    "truestep": {
        "stage": "private",
        "clusters": [
            {**FIRST_CLUSTER, "security_group_id": "sg-0c100000", "amp_workspace_arn": WORKSPACE},
            SECOND_CLUSTER,
        ],
        "network": {
            "vpc_id": "vpc-0a100000",
            "subnet_ids": ["subnet-0a100000", "subnet-0a200000"],
            "interface_endpoints": ["eks", "sts", "sagemaker.api"],
        },
        "existing_topic_arn": EXISTING_TOPIC,
        "existing_topic_key_arn": EXISTING_KEY,
        "existing_event_bus_name": "shared",
        "approval_domain": {"name": "approve.example.com", "certificate_arn": CERTIFICATE},
        "approver_emails": ["oncall@example.com"],
        "training_account_ids": ["444455556666"],
        "policy": {"dry_run": True, "clusters": {FIRST_CLUSTER["hyperpod_cluster_arn"]: {"max_quarantined_nodes": 3}}},
        "training_silence_hours": 6,
        "log_retention_days": 30,
        "log_level": "DEBUG",
        "deletion_protection": False,
    }
}


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = tmp_path_factory.mktemp("private")
    path = folder / "context.json"
    path.write_text(json.dumps(CONTEXT))
    # With the security rules on: what only some settings make must hold too.
    assert app.main(["--context", str(path), "--output", str(folder / "out"), "--nag"]) == 0
    return Template(folder / "out")


def test_the_context_has_every_setting() -> None:
    settings = CONTEXT["truestep"]
    assert set(settings) == set(DeploymentSettings.model_fields)
    assert set(settings["network"]) == set(NetworkSettings.model_fields) - {"security_group_ids"}
    assert set(settings["approval_domain"]) == set(ApprovalDomainSettings.model_fields)
    assert set(settings["clusters"][0]) == set(ClusterSettings.model_fields) - {"amp_query_url"}


def test_nothing_that_exists_is_made_again(private: Template) -> None:
    kinds = {item["Type"] for item in private.resources.values()}
    assert kinds.isdisjoint({"AWS::EC2::VPC", "AWS::EC2::Subnet", "AWS::SNS::Topic", "AWS::Events::EventBus"})
    assert not private.document.get("Parameters", {}).keys() - {"BootstrapVersion"}


def test_functions_that_call_kubernetes_run_in_the_vpc_in_a_group_that_lets_nobody_in(private: Template) -> None:
    inside = {folder for folder, one in private.functions.items() if "VpcConfig" in one}
    assert inside == {spec.folder for spec in FUNCTIONS if Access.KUBERNETES in spec.access}
    config = private.functions["cordon_node"]["VpcConfig"]
    assert config["SubnetIds"] == ["subnet-0a100000", "subnet-0a200000"]
    (group,) = [one["Fn::GetAtt"][0] for one in config["SecurityGroupIds"]]
    made = private.of_type("AWS::EC2::SecurityGroup")[group]
    assert made["VpcId"] == "vpc-0a100000"
    assert "SecurityGroupIngress" not in made
    assert [(rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in made["SecurityGroupEgress"]] == [
        ("tcp", 443, 443)
    ]


def test_only_the_private_clusters_group_lets_the_functions_in(private: Template) -> None:
    ingress = private.only("AWS::EC2::SecurityGroupIngress")
    assert ingress["GroupId"] == "sg-0c100000"
    assert (ingress["FromPort"], ingress["ToPort"]) == (443, 443)
    own = private.functions["cordon_node"]["VpcConfig"]["SecurityGroupIds"][0]
    assert ingress["SourceSecurityGroupId"]["Fn::GetAtt"][0] == own["Fn::GetAtt"][0]


def test_the_endpoints_that_were_asked_for_are_made_and_let_the_functions_in(private: Template) -> None:
    endpoints = private.of_type("AWS::EC2::VPCEndpoint").values()
    names = {json.dumps(one["ServiceName"]).rsplit(".", 1)[-1].strip('"]}') for one in endpoints}
    assert names == {"eks", "sts", "api"}
    groups = {json.dumps(one["SecurityGroupIds"]) for one in endpoints}
    assert len(groups) == 1
    (ingress,) = private.of_type("AWS::EC2::SecurityGroup")[json.loads(groups.pop())[0]["Fn::GetAtt"][0]][
        "SecurityGroupIngress"
    ]
    assert ingress["FromPort"] == 443
    assert "CidrIp" not in ingress


def test_both_clusters_admit_the_functions_and_are_told_to_them(private: Template) -> None:
    entries = private.of_type("AWS::EKS::AccessEntry").values()
    assert {one["ClusterName"] for one in entries} == {"training-eks", "second-eks"}
    told = json.loads(private.functions["cordon_node"]["Environment"]["Variables"]["TRUESTEP_CLUSTERS"])
    assert len(told) == 2


def test_announcements_go_to_the_customers_topic_with_its_key(private: Template) -> None:
    alarms = private.of_type("AWS::CloudWatch::Alarm").values()
    assert {json.dumps(one["AlarmActions"]) for one in alarms} == {json.dumps([EXISTING_TOPIC])}
    grants = {action: one["Resource"] for one in private.function_statements("escalate") for action in one["Action"]}
    assert grants["sns:Publish"] == [EXISTING_TOPIC]
    assert grants["kms:Decrypt"] == [EXISTING_KEY]


def test_code_in_the_vpc_cannot_use_the_right_to_make_interfaces(private: Template) -> None:
    statements = private.function_statements("cordon_node")
    (given,) = [one for one in statements if one["Effect"] == "Allow" and "ec2:CreateNetworkInterface" in one["Action"]]
    (denied,) = [one for one in statements if one["Effect"] == "Deny"]
    assert denied["Action"] == [action for action in given["Action"] if action.startswith("ec2:")]
    function = json.dumps(denied["Condition"]["ArnEquals"]["lambda:SourceFunctionArn"])
    assert ":function:truestep-private-cordon-node" in function


def test_the_links_have_the_name_and_the_apis_own_address_is_off(private: Template) -> None:
    told = private.functions["request_approval"]["Environment"]["Variables"]["TRUESTEP_APPROVAL_URL"]
    assert told == "https://approve.example.com"
    assert private.only("AWS::ApiGatewayV2::Api")["DisableExecuteApiEndpoint"] is True
    domain = private.only("AWS::ApiGatewayV2::DomainName")
    assert domain["DomainName"] == "approve.example.com"
    (configuration,) = domain["DomainNameConfigurations"]
    assert (configuration["CertificateArn"], configuration["SecurityPolicy"]) == (CERTIFICATE, "TLS_1_2")
    mapping = private.only("AWS::ApiGatewayV2::ApiMapping")
    assert list(private.of_type("AWS::ApiGatewayV2::Stage")) == [mapping["Stage"]["Ref"]]
    outputs = private.document["Outputs"]
    assert outputs["ApprovalUrl"]["Value"] == told
    assert "ApprovalDomainTarget" in outputs
    assert "ApprovalApiUrl" not in outputs


def test_a_front_of_ones_own_serves_the_name_and_reaches_the_api(synthesised: Callable[..., Template]) -> None:
    template = synthesised(approval_domain={"name": "approve.example.com"})
    told = template.functions["escalate"]["Environment"]["Variables"]["TRUESTEP_APPROVAL_URL"]
    assert told == "https://approve.example.com"
    assert "DisableExecuteApiEndpoint" not in template.only("AWS::ApiGatewayV2::Api")
    assert "Fn::GetAtt" in template.document["Outputs"]["ApprovalApiUrl"]["Value"]
    assert "ApprovalDomainTarget" not in template.document["Outputs"]


OWN_GROUP = {"subnet_ids": ["subnet-10000000"], "security_group_ids": ["sg-10000000"]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"network": {"subnet_ids": ["subnet-10000000"]}}, "give security_group_ids, or vpc_id"),
    ({"network": {**OWN_GROUP, "interface_endpoints": ["eks"]}}, "interface_endpoints need vpc_id"),
    (
        {"network": {"subnet_ids": ["subnet-10000000"], "vpc_id": "vpc-10000000", "interface_endpoints": ["dynamodb"]}},
        "truestep.network.interface_endpoints[0]: ",
    ),
    ({"clusters": [{**FIRST_CLUSTER, "security_group_id": "sg-10000000"}]}, "needs network.vpc_id"),
    (
        {
            "clusters": [
                FIRST_CLUSTER,
                {
                    **SECOND_CLUSTER,
                    "hyperpod_cluster_arn": "arn:aws:sagemaker:eu-west-1:111122223333:cluster/zzz999zzz999",
                },
            ]
        },
        "one account and region",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_network_that_cannot_work_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_settings({"truestep": {"clusters": [FIRST_CLUSTER], **changes}})
    assert message in str(caught.value)
