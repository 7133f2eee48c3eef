"""Several clusters, a private endpoint, an existing VPC, topic and bus: from a context file alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

import app
from infra.catalogue import FUNCTIONS, Access
from infra.configuration import parse_settings
from infra.errors import ConfigurationError

from .conftest import EXISTING_KEY, EXISTING_TOPIC, FIRST_CLUSTER, SECOND_CLUSTER, Template

CONTEXT = {
    "truestep": {
        "stage": "private",
        "clusters": [{**FIRST_CLUSTER, "security_group_id": "sg-0c1"}, SECOND_CLUSTER],
        "network": {
            "vpc_id": "vpc-0a1",
            "subnet_ids": ["subnet-0a1", "subnet-0a2"],
            "interface_endpoints": ["eks", "sts", "sagemaker.api"],
        },
        "existing_topic_arn": EXISTING_TOPIC,
        "existing_topic_key_arn": EXISTING_KEY,
        "existing_event_bus_name": "shared",
    }
}


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = tmp_path_factory.mktemp("private")
    path = folder / "context.json"
    path.write_text(json.dumps(CONTEXT))
    assert app.main(["--context", str(path), "--output", str(folder / "out")]) == 0
    return Template(folder / "out")


def test_nothing_that_exists_is_made_again(private: Template) -> None:
    kinds = {item["Type"] for item in private.resources.values()}
    assert kinds.isdisjoint({"AWS::EC2::VPC", "AWS::EC2::Subnet", "AWS::SNS::Topic", "AWS::Events::EventBus"})
    assert not private.document.get("Parameters", {}).keys() - {"BootstrapVersion"}


def test_functions_that_call_kubernetes_run_in_the_vpc_in_a_group_that_lets_nobody_in(private: Template) -> None:
    inside = {folder for folder, one in private.functions.items() if "VpcConfig" in one}
    assert inside == {spec.folder for spec in FUNCTIONS if Access.KUBERNETES in spec.access}
    config = private.functions["cordon_node"]["VpcConfig"]
    assert config["SubnetIds"] == ["subnet-0a1", "subnet-0a2"]
    (group,) = [one["Fn::GetAtt"][0] for one in config["SecurityGroupIds"]]
    made = private.of_type("AWS::EC2::SecurityGroup")[group]
    assert made["VpcId"] == "vpc-0a1"
    assert "SecurityGroupIngress" not in made
    assert [(rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in made["SecurityGroupEgress"]] == [
        ("tcp", 443, 443)
    ]


def test_only_the_private_clusters_group_lets_the_functions_in(private: Template) -> None:
    ingress = private.only("AWS::EC2::SecurityGroupIngress")
    assert ingress["GroupId"] == "sg-0c1"
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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"network": {"subnet_ids": ["subnet-1"]}}, "give security_group_ids, or vpc_id"),
    (
        {"network": {"subnet_ids": ["subnet-1"], "security_group_ids": ["sg-1"], "interface_endpoints": ["eks"]}},
        "interface_endpoints need vpc_id",
    ),
    (
        {"network": {"subnet_ids": ["subnet-1"], "vpc_id": "vpc-1", "interface_endpoints": ["dynamodb"]}},
        "truestep.network.interface_endpoints[0]: ",
    ),
    ({"clusters": [{**FIRST_CLUSTER, "security_group_id": "sg-1"}]}, "needs network.vpc_id"),
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
