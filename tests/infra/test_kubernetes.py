"""In the cluster the recovery may quarantine nodes and suspend jobs, and can delete nothing."""

from __future__ import annotations

from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from infra.access import KUBERNETES_GROUP
from infra.lint import check_manifests
from infra.paths import KUBERNETES_MANIFESTS
from lambdas.domain.cluster_access import NEEDED_VERBS
from lambdas.domain.cluster_jobs import JOB_KINDS


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((KUBERNETES_MANIFESTS / "cluster-role.yaml").read_text())
    found: list[dict[str, Any]] = document["rules"]
    return found


def verbs(rules: list[dict[str, Any]], group: str, resource: str) -> set[str]:
    return {
        verb for rule in rules if group in rule["apiGroups"] and resource in rule["resources"] for verb in rule["verbs"]
    }


@pytest.mark.parametrize("kind", sorted(JOB_KINDS))
def test_every_job_kind_that_is_handled_can_be_read_and_suspended(kind: str, rules: list[dict[str, Any]]) -> None:
    how = JOB_KINDS[kind]
    assert {"get", "patch"} <= verbs(rules, how.group, how.plural)


@pytest.mark.parametrize(
    ("resource", "needed"),
    [
        ("nodes", {"get", "patch"}),
        ("pods", {"get", "list"}),
        ("pods/log", {"get"}),
        ("configmaps", {"get", "create", "patch"}),
    ],
)
def test_what_the_adapter_calls_is_allowed(resource: str, needed: set[str], rules: list[dict[str, Any]]) -> None:
    assert needed <= verbs(rules, "", resource)


def test_what_check_access_asks_for_is_what_is_granted(rules: list[dict[str, Any]]) -> None:
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {(needed.group, needed.resource, needed.verb) for needed in NEEDED_VERBS} == granted


def test_nothing_can_be_deleted_and_no_secret_read(rules: list[dict[str, Any]]) -> None:
    granted = {verb for rule in rules for verb in rule["verbs"]}
    assert granted <= {"get", "list", "create", "patch"}
    assert "secrets" not in {resource for rule in rules for resource in rule["resources"]}


def test_the_group_of_the_access_entries_is_bound() -> None:
    binding = yaml.safe_load((KUBERNETES_MANIFESTS / "cluster-role-binding.yaml").read_text())
    assert [subject["name"] for subject in binding["subjects"]] == [KUBERNETES_GROUP]
    assert check_manifests(KUBERNETES_MANIFESTS).problems == ""
