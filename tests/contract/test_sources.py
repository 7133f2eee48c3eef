"""One event source a cluster and namespace: nobody shares one, and EventBridge takes every one."""

from __future__ import annotations

import re

import pytest

from truestep.contract import ContractError, training_source

ARN = "arn:aws:sagemaker:us-west-2:111122223333:cluster/{}"
CLUSTER = ARN.format("abc123def456")


def test_a_source_names_the_cluster_and_the_namespace() -> None:
    assert training_source(CLUSTER, "team-a") == "truestep.training.abc123def456.team-a"


def test_the_longest_source_is_one_that_eventbridge_and_iam_take_as_it_is() -> None:
    longest = training_source(ARN.format("c" * 63), "n" * 63)
    # PutEvents: 1 to 256 characters of this alphabet. No character is a wildcard or a variable to IAM.
    assert re.fullmatch(r"[/.\-_A-Za-z0-9]{1,256}", longest)


@pytest.mark.parametrize(
    ("cluster_arn", "namespace", "variable"),
    [
        ("", "a", "TRUESTEP_CLUSTER_ARN"),
        ("abc123def456", "a", "TRUESTEP_CLUSTER_ARN"),
        (ARN.format("a.b"), "c", "TRUESTEP_CLUSTER_ARN"),
        (ARN.format("a/b"), "c", "TRUESTEP_CLUSTER_ARN"),
        (ARN.format("*"), "a", "TRUESTEP_CLUSTER_ARN"),
        (CLUSTER + "\n", "a", "TRUESTEP_CLUSTER_ARN"),
        (CLUSTER, "", "POD_NAMESPACE"),
        (CLUSTER, "a.b", "POD_NAMESPACE"),
        (CLUSTER, "*", "POD_NAMESPACE"),
        (CLUSTER, "A", "POD_NAMESPACE"),
        (CLUSTER, "a\n", "POD_NAMESPACE"),
        (CLUSTER, "a" * 64, "POD_NAMESPACE"),
    ],
)
def test_no_source_is_made_of_a_place_that_could_be_another(cluster_arn: str, namespace: str, variable: str) -> None:
    with pytest.raises(ContractError, match=f"set {variable}"):
        training_source(cluster_arn, namespace)
