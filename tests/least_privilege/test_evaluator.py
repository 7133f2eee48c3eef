"""The evaluator answers as IAM documents it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.least_privilege.policies import Request, UnknownPolicyElementError, allowed, grants_of

ARN = "arn:aws:s3:::bucket/a/b"


def answer(*statements: dict[str, Any], action: str = "s3:GetObject", resource: str = ARN, **context: str) -> bool:
    grants = grants_of({"Statement": list(statements)})
    return allowed(list(grants), Request(action=action, resource=resource, context=context))


def allow(**changes: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": "s3:GetObject", "Resource": ARN} | changes


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (allow(), True),
        (allow(Action="S3:getobject"), True),
        (allow(Action=["s3:PutObject", "s3:Get*"]), True),
        (allow(Action="s3:PutObject"), False),
        (allow(Resource="arn:aws:s3:::bucket/*"), True),
        (allow(Resource="arn:aws:s3:::bucket/?/b"), True),
        (allow(Resource="arn:aws:s3:::bucket/[a]/b"), False),
        (allow(Resource="arn:aws:s3:::BUCKET/a/b"), False),
        (allow(Resource=["arn:aws:s3:::other/*", "*"]), True),
        (allow(Effect="Deny"), False),
    ],
)
def test_actions_and_resources(statement: dict[str, Any], expected: bool) -> None:
    assert answer(statement) is expected


def test_what_nothing_allows_is_refused() -> None:
    assert answer() is False


def test_a_denial_beats_every_permission() -> None:
    assert answer(allow(Resource="*"), allow(Effect="Deny", Action="s3:*")) is False


def test_a_condition_holds_for_any_of_its_values_and_all_of_its_keys() -> None:
    like = allow(Condition={"StringLike": {"s3:prefix": ["a", "a/*"]}})
    assert answer(like, **{"s3:prefix": "a/b"}) is True
    assert answer(like, **{"S3:Prefix": "a"}) is True
    assert answer(like, **{"s3:prefix": "b"}) is False
    assert answer(like) is False
    both = allow(Condition={"StringLike": {"one": "*"}, "StringEquals": {"two": "x*"}})
    assert answer(both, one="1", two="x*") is True
    assert answer(both, one="1", two="xy") is False


@pytest.mark.parametrize(
    "changes",
    [{"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}, {"NotAction": "s3:*"}, {"Principal": "*"}],
)
def test_what_is_not_understood_never_passes(changes: dict[str, Any]) -> None:
    with pytest.raises(UnknownPolicyElementError):
        answer(allow(**changes))
