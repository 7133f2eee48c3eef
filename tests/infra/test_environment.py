"""Functions are told what ``lambdas.settings`` reads, under its names, and the template has no circle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any

import pytest

from infra.catalogue import FUNCTIONS
from lambdas.settings import APPROVAL_URL, FUNCTION_VARIABLES, settings_from_environment

from .conftest import CLUSTER_ARN, Template

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
