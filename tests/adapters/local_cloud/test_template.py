"""Templates are read as CloudFormation reads them, and what cannot be deployed is refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from local_stack.deploy import clusters_of, deploy
from local_stack.template import Environment, Resolver, StackTemplate, TemplateError, load_assembly
from tests.adapters.local_cloud.assembly import function, write_assembly

TEMPLATE = {
    "Parameters": {"Stage": {"Type": "String", "Default": "prod"}, "Needed": {"Type": "String"}},
    "Mappings": {"Sizes": {"us-east-1": {"large": "17"}}},
    "Conditions": {
        "IsProd": {"Fn::Equals": [{"Ref": "Stage"}, "prod"]},
        "IsNeither": {"Fn::And": [{"Condition": "IsProd"}, {"Fn::Not": [{"Condition": "IsProd"}]}]},
        "IsEither": {"Fn::Or": [{"Condition": "IsNeither"}, {"Condition": "IsProd"}]},
    },
    "Resources": {},
}


def resolver() -> Resolver:
    return Resolver(
        StackTemplate(name="test", template=TEMPLATE, assets={}),
        Environment(account_id="111122223333", region="us-east-1"),
        reference=lambda name: f"ref-{name}",
        attribute=lambda name, attribute: f"{name}/{attribute}",
        imported=lambda name: f"import-{name}",
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ({"Ref": "Thing"}, "ref-Thing"),
        ({"Ref": "Stage"}, "prod"),
        ({"Ref": "AWS::Region"}, "us-east-1"),
        ({"Fn::GetAtt": ["Thing", "Arn"]}, "Thing/Arn"),
        ({"Fn::GetAtt": "Thing.Endpoint.Url"}, "Thing/Endpoint.Url"),
        ({"Fn::Join": [":", ["arn", {"Ref": "AWS::Partition"}, {"Ref": "AWS::AccountId"}]]}, "arn:aws:111122223333"),
        ({"Fn::Sub": "${Thing}-${Thing.Arn}-${!No}-${AWS::URLSuffix}"}, "ref-Thing-Thing/Arn-${No}-amazonaws.com"),
        ({"Fn::Sub": ["${Own}-${Thing}", {"Own": {"Ref": "Stage"}}]}, "prod-ref-Thing"),
        ({"Fn::Select": ["1", {"Fn::Split": ["/", "a/b/c"]}]}, "b"),
        ({"Fn::If": ["IsProd", "yes", "no"]}, "yes"),
        ({"Fn::If": ["IsNeither", "yes", "no"]}, "no"),
        ({"Fn::If": ["IsEither", "yes", "no"]}, "yes"),
        ({"Fn::FindInMap": ["Sizes", {"Ref": "AWS::Region"}, "large"]}, "17"),
        ({"Fn::ImportValue": "Other"}, "import-Other"),
        ({"Fn::Base64": "hi"}, "aGk="),
        ({"a": {"Ref": "AWS::NoValue"}, "b": [{"Ref": "AWS::NoValue"}, 1]}, {"b": [1]}),
        ({"Condition": {"Bool": {"aws:Secure": "no"}}}, {"Condition": {"Bool": {"aws:Secure": "no"}}}),
    ],
)  # fmt: skip
def test_intrinsic_functions(expression: Any, value: Any) -> None:
    assert resolver().resolve(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ({"Fn::Cidr": ["10.0.0.0/16", 2]}, "Fn::Cidr is not known here"),
        ({"Ref": "Needed"}, "parameter Needed has no default"),
        ({"Fn::If": ["Absent", 1, 2]}, "condition Absent does not exist"),
        ({"Fn::FindInMap": ["Sizes", "eu-west-1", "large"]}, r"Mappings has no Sizes\.eu-west-1\.large"),
    ],
)
def test_what_cannot_be_resolved_is_named(expression: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        resolver().resolve(expression)


def refuse(directory: Path, resources: dict[str, Any], message: str, **sections: Any) -> None:
    """Expect a refusal before any service is called."""

    def no_client(service: str) -> Any:
        raise AssertionError(f"{service} was called")

    stacks = load_assembly(write_assembly(directory / "cdk.out", resources, **sections))
    with pytest.raises(TemplateError, match=message):
        deploy(
            stacks,
            account_id="111122223333",
            region="us-east-1",
            endpoint_url="http://127.0.0.1:1",
            client=no_client,
            host_layer=directory / "layer-host",
        )


def test_an_unknown_resource_type_is_refused_with_where_to_add_it(tmp_path: Path) -> None:
    refuse(tmp_path, {"Vpc": {"Type": "AWS::EC2::VPC"}}, r"AWS::EC2::VPC.*local_stack/resources")


def test_a_circle_of_references_is_refused_with_its_members(tmp_path: Path) -> None:
    circle = {
        "A": {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": {"Ref": "B"}}},
        "B": {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": {"Ref": "A"}}},
    }
    refuse(tmp_path, circle, "A -> B -> A")


def test_a_reference_to_nothing_is_refused(tmp_path: Path) -> None:
    refuse(
        tmp_path,
        {"A": {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": {"Ref": "Absent"}}}},
        "refers to Absent, which it does not have",
    )


def test_a_layer_without_the_host_s_dependencies_is_refused_with_how_to_make_them(tmp_path: Path) -> None:
    refuse(tmp_path, {"Layer": {"Type": "AWS::Lambda::LayerVersion"}}, r"layer-host.*python -m infra\.wheelhouse")


def test_a_function_without_a_staged_asset_is_refused(tmp_path: Path) -> None:
    inline = function("index.handler")
    inline["Properties"]["Code"] = {"ZipFile": "def handler(): ..."}
    refuse(tmp_path, {"Inline": inline}, r"function Inline: its code \(inline\) is no staged asset")


def test_a_directory_that_is_no_assembly_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"no manifest\.json: synthesise first"):
        load_assembly(tmp_path)


def test_clusters_come_from_the_functions_settings() -> None:
    first = {"TRUESTEP_CLUSTERS": json.dumps({"arn:a": {"eks_cluster_name": "a"}})}
    second = {"TRUESTEP_CLUSTERS": json.dumps({"arn:b": {"eks_cluster_name": "b"}})}

    assert set(clusters_of([first, {}, second])) == {"arn:a", "arn:b"}
    with pytest.raises(TemplateError, match="TRUESTEP_CLUSTERS of a function is no JSON object"):
        clusters_of([{"TRUESTEP_CLUSTERS": "{"}])
