"""Each function may do exactly what it did."""

from __future__ import annotations

import copy

import pytest

from lambdas.settings import FUNCTION_VARIABLES
from local_stack.template import StackTemplate
from tests.least_privilege.policies import refused, unused
from tests.least_privilege.roles import Roles
from tests.least_privilege.story import Story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def changed(story: Story, template: StackTemplate) -> Roles:
    """The roles of a copy that a test may change."""
    return Roles(story.stack, copy.deepcopy(template))


@pytest.mark.parametrize("folder", FUNCTION_VARIABLES)
def test_everything_that_a_function_did_is_allowed(folder: str, roles: Roles) -> None:
    role = roles.function_role(folder)
    assert roles.requests(role), "the story never calls this function"
    assert refused(roles.grants(role), roles.requests(role)) == []


@pytest.mark.parametrize("folder", FUNCTION_VARIABLES)
def test_nothing_is_allowed_that_a_function_did_not_need(folder: str, roles: Roles) -> None:
    role = roles.function_role(folder)
    assert unused(roles.grants(role), roles.requests(role)) == []


def test_every_other_role_may_do_exactly_what_it_did(roles: Roles) -> None:
    others = set(roles.names) - {roles.function_role(folder) for folder in FUNCTION_VARIABLES}
    assert len(others) == 2, "the state machines'"
    for role in others:
        assert roles.requests(role)
        assert refused(roles.grants(role), roles.requests(role)) == []
        assert unused(roles.grants(role), roles.requests(role)) == []


def test_a_permission_that_is_removed_is_missed(changed: Roles) -> None:
    role = changed.function_role("replace_node")
    for document in changed.policies(role):
        for statement in document["Statement"]:
            if "sagemaker:BatchReplaceClusterNodes" in statement["Action"]:
                statement["Action"] = [
                    one for one in statement["Action"] if one != "sagemaker:BatchReplaceClusterNodes"
                ]
    (missed,) = refused(changed.grants(role), changed.requests(role))
    assert missed.startswith("sagemaker:BatchReplaceClusterNodes on arn:aws:sagemaker:")


def test_a_permission_on_another_resource_is_missed_and_unused(changed: Roles) -> None:
    role = changed.function_role("close_incident")
    for document in changed.policies(role):
        for statement in document["Statement"]:
            if statement["Action"] == "s3:PutObject":
                statement["Resource"] = "arn:aws:s3:::elsewhere/incidents/*"
    missed = {text.split(" ")[0] for text in refused(changed.grants(role), changed.requests(role))}
    assert missed == {"s3:PutObject"}
    assert unused(changed.grants(role), changed.requests(role)) == [
        "Allow s3:PutObject on arn:aws:s3:::elsewhere/incidents/*"
    ]


def test_a_permission_that_nobody_uses_is_found(changed: Roles) -> None:
    role = changed.function_role("open_incident")
    extra = {"Effect": "Allow", "Action": ["sns:Publish"], "Resource": "*"}
    changed.policies(role)[0]["Statement"].append(extra)
    assert refused(changed.grants(role), changed.requests(role)) == []
    assert unused(changed.grants(role), changed.requests(role)) == ["Allow sns:Publish on *"]
