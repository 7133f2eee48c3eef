"""``truestep check-access`` names the group, the namespace and the command that mends it, and needs no group itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lambdas.adapters import aws
from lambdas.check_access.handler import check_access
from lambdas.domain.cluster_access import Group
from local_stack.access_keys import SECRET_ACCESS_KEY
from tests.adapters.cluster.world import (
    ACCESS_KEY,
    EKS_NAME,
    HYPERPOD_ARN,
    HYPERPOD_NAME,
    NAMESPACE,
    ROOT,
    World,
    running_world,
    serving_eks,
)

ROLE = "arn:aws:iam::123456789012:role/check-access"


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A cluster where somebody took one verb out of a role, and the asker is in no group but its own."""
    folder = tmp_path_factory.mktemp("lacking")
    manifests = Path(shutil.copytree(ROOT / "infra" / "kubernetes", folder / "manifests"))
    evidence = manifests / "namespace" / "evidence.yaml"
    evidence.write_text(evidence.read_text().replace('["get"]', '["list"]'))
    with running_world(folder / "state", manifests=manifests) as world:
        yield world


@pytest.fixture
def asked(credentials: None, lacking: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with serving_eks(lacking.description) as eks_url:
        variables = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_EKS": eks_url,
            "AWS_ENDPOINT_URL_SAGEMAKER": lacking.control_url,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        aws._client.cache_clear()
        yield lacking


def details(world: World, monkeypatch: pytest.MonkeyPatch, *namespaces: str, groups: tuple[str, ...]) -> dict[str, str]:
    """Check -> what is missing, of those that are not ok."""
    world.control("/local/principals", {ACCESS_KEY: {"role_arn": ROLE, "groups": list(groups)}})
    cluster = {"hyperpod_cluster_name": HYPERPOD_NAME, "eks_cluster_name": EKS_NAME, "training_namespaces": namespaces}
    monkeypatch.setenv("TRUESTEP_CLUSTERS", json.dumps({HYPERPOD_ARN: cluster}))
    (findings,) = check_access({}, None)["clusters"].values()
    return {one["check"]: one["detail"] for one in findings if not one["ok"]}


def test_a_verb_that_a_role_lacks_and_a_namespace_without_roles_are_named_with_their_commands(
    asked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = details(asked, monkeypatch, NAMESPACE, "team-b", groups=(Group.REVIEW,))
    assert missing.keys() == {f"Kubernetes permissions in {name}" for name in (NAMESPACE, "team-b")}
    assert missing[f"Kubernetes permissions in {NAMESPACE}"] == (
        f"in namespace {NAMESPACE}: group truestep-evidence may not get pods/log: run kubectl apply -n {NAMESPACE} "
        "-k infra/kubernetes/namespace against this cluster"
    )
    everything = missing["Kubernetes permissions in team-b"]
    for words in ("group truestep-directives may not patch configmaps", "kubectl apply -n team-b -k"):
        assert words in everything


def test_whoever_may_not_even_ask_is_told_to_apply_the_manifests(asked: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (detail,) = details(asked, monkeypatch, NAMESPACE, groups=(Group.JOBS,)).values()
    assert "subjectaccessreviews" in detail
    assert "kubectl apply -k infra/kubernetes/cluster" in detail
