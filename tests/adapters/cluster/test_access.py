"""Reaching the cluster with the recovery's own credentials, and what is said where that does not work."""

from __future__ import annotations

import boto3
import pytest

from lambdas.adapters.eks_access import REFRESH_AFTER_SECONDS, ClusterAccessError, EksTokens, connect
from lambdas.adapters.kubernetes import Kubernetes, KubernetesError
from lambdas.domain.errors import TransientError
from tests.adapters.cluster.world import EKS_NAME, World

REGION = "us-east-1"


def test_a_token_is_kept_while_fresh_and_signed_again_in_time(credentials: None) -> None:
    now = [0.0]
    tokens = EksTokens(boto3.Session(region_name=REGION), EKS_NAME, clock=lambda: now[0])
    first = tokens.current()
    assert first.startswith("k8s-aws-v1.")
    assert "=" not in first
    signed = []
    tokens._sign = lambda: signed.append(now[0]) or "k8s-aws-v1.new"  # type: ignore[func-returns-value,method-assign]
    now[0] = REFRESH_AFTER_SECONDS - 1
    assert tokens.current() == first
    now[0] = REFRESH_AFTER_SECONDS
    assert tokens.current() == "k8s-aws-v1.new"
    assert signed == [REFRESH_AFTER_SECONDS]


def test_a_token_that_the_server_refuses_is_signed_again_once(access: None, world: World) -> None:
    client = connect(boto3.Session(region_name=REGION), EKS_NAME)
    client._client._client._transport._tokens._token = "k8s-aws-v1.stale"
    client._client._client._transport._tokens._signed_at = float("inf")
    name = world.nodes()[0]["node_name"]
    node = Kubernetes(client).node(name)
    client.close()
    assert node is not None
    assert node["metadata"]["name"] == name


def test_an_unknown_cluster_is_named_with_the_setting_to_correct(access: None) -> None:
    with pytest.raises(ClusterAccessError, match="correct eks_cluster_name"):
        connect(boto3.Session(region_name=REGION), "elsewhere")


def test_a_role_without_an_access_entry_is_told_to_get_one(access: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "LOCALSTRANGER")
    kubernetes = Kubernetes(connect(boto3.Session(region_name=REGION), EKS_NAME))
    with pytest.raises(KubernetesError, match="EKS access entry"):
        kubernetes.node("any")
    kubernetes.close()


def test_a_role_outside_the_group_is_told_to_apply_the_manifests(
    access: None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.control("/local/principals", {"LOCALGUEST": {"role_arn": "arn:aws:iam::1:role/guest", "groups": []}})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "LOCALGUEST")
    kubernetes = Kubernetes(connect(boto3.Session(region_name=REGION), EKS_NAME))
    with pytest.raises(KubernetesError, match="apply the manifests"):
        kubernetes.node("any")
    kubernetes.close()


def test_a_server_that_does_not_answer_is_worth_another_try(access: None) -> None:
    client = connect(boto3.Session(region_name=REGION), EKS_NAME)
    client._client._client.base_url = "https://127.0.0.1:9"
    kubernetes = Kubernetes(client)
    with pytest.raises(TransientError, match="does not answer"):
        kubernetes.node("any")
    kubernetes.close()
