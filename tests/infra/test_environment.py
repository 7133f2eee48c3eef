"""Functions are told what ``lambdas.settings`` reads, under its names, and the template has no circle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from infra.catalogue import FUNCTIONS
from infra.configuration import parse_settings
from infra.environment import most_bytes
from infra.errors import ConfigurationError
from infra.synthesis import synthesise
from lambdas.settings import APPROVAL_URL, FUNCTION_VARIABLES, settings_from_environment

from .conftest import CLUSTER_ARN, FIRST_CLUSTER, Template, repository_context

FOLDERS = [spec.folder for spec in FUNCTIONS]


def test_the_catalogue_has_the_functions_that_settings_knows() -> None:
    assert set(FOLDERS) == set(FUNCTION_VARIABLES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_function_gets_exactly_its_variables(folder: str, template: Template) -> None:
    variables = template.functions[folder]["Environment"]["Variables"]
    assert {name for name in variables if name.startswith("TRUESTEP_")} == set(FUNCTION_VARIABLES[folder])


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_function_can_read_what_it_gets(folder: str, template: Template) -> None:
    variables = template.functions[folder]["Environment"]["Variables"]
    deployed = {name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()}
    settings = settings_from_environment(folder, deployed)
    assert settings.cluster(CLUSTER_ARN).eks_cluster_name == "training-eks"
    assert settings.policy(CLUSTER_ARN).max_quarantined_nodes == 2


def test_the_function_behind_the_api_does_not_depend_on_the_api(template: Template) -> None:
    assert APPROVAL_URL not in template.functions["decide_approval"]["Environment"]["Variables"]


def test_resources_depend_on_one_another_without_a_circle(template: Template) -> None:
    graph = {name: set(references(item)) & set(template.resources) for name, item in template.resources.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == set(template.resources)


def test_the_state_machines_that_functions_are_told_of_are_those_there(template: Template) -> None:
    told = template.functions["decide_approval"]["Environment"]["Variables"]
    recovery, approve = told["TRUESTEP_STATE_MACHINE_ARN"], told["TRUESTEP_APPROVE_STATE_MACHINE_ARN"]
    assert template.functions["receive_alarm"]["Environment"]["Variables"]["TRUESTEP_STATE_MACHINE_ARN"] == recovery
    for arn, name in ((recovery, "recovery"), (approve, "approve")):
        assert arn["Fn::Join"][1][-1] == f":stateMachine:{template.state_machine(name)['StateMachineName']}"


def test_more_clusters_than_an_environment_holds_are_refused_with_how_many_fit(tmp_path: Path) -> None:
    arns = [f"arn:aws:sagemaker:us-west-2:111122223333:cluster/{number:012d}" for number in range(40)]
    clusters = [
        {**FIRST_CLUSTER, "hyperpod_cluster_arn": arn, "eks_cluster_name": f"eks-{arn[-2:]}", "checkpoint_buckets": []}
        for arn in arns
    ]
    policy = {"clusters": {arns[-1]: {"dry_run": True}}}
    with pytest.raises(ConfigurationError, match=r"Lambda allows 4096: .* for 40 clusters") as refused:
        synthesise(repository_context(clusters=clusters, policy=policy), tmp_path)
    found = re.search(r"The first (\d+) fit: deploy the others as another stage", str(refused.value))
    assert found, refused.value
    fitting = int(found[1])
    sizes = [
        most_bytes(parse_settings(repository_context(clusters=clusters[:number], policy={})))
        for number in (fitting, fitting + 1)
    ]
    assert sizes[0] <= 4096 < sizes[1]

    clusters[0]["training_namespaces"] = [f"team-{number:050d}" for number in range(80)]
    with pytest.raises(ConfigurationError, match="Not even the first fits: list fewer training_namespaces"):
        synthesise(repository_context(clusters=clusters[:1]), tmp_path)


def references(value: Any) -> Iterator[str]:
    """Logical ids that a piece of template refers to."""
    if isinstance(value, dict):
        if isinstance(value.get("Ref"), str):
            yield value["Ref"]
        if isinstance(value.get("Fn::GetAtt"), list):
            yield value["Fn::GetAtt"][0]
        yield from value.get("DependsOn", [])
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)
