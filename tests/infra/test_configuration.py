"""Settings are checked before anything is made, and a message names the setting that is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.configuration import parse_settings
from infra.environment import clusters_document
from infra.errors import ConfigurationError
from infra.permissions import checkpoint_object_arns

OTHER_ARN = "arn:aws:sagemaker:us-west-2:111122223333:cluster/zzz999zzz999"


def parse(**section: Any) -> Any:
    return parse_settings({"truestep": section})


def test_one_cluster_is_enough_and_the_rest_has_defaults(cluster: dict[str, Any]) -> None:
    settings = parse(clusters=[cluster])
    assert settings.stage == "prod"
    assert settings.deletion_protection is True
    assert settings.policy == {}


def _namespaces(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings["clusters"][0].update(training_namespaces=list(names))


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda s: s.pop("clusters"), "truestep.clusters: missing"),
    (lambda s: s.update(clusters=[]), "truestep.clusters: "),
    (lambda s: s.update(stage="Prod_1"), "truestep.stage: "),
    (lambda s: s.update(stagename="x"), "truestep.stagename: no such setting"),
    (lambda s: s["clusters"][0].pop("eks_cluster_name"), "truestep.clusters[0].eks_cluster_name: missing"),
    (
        lambda s: s["clusters"][0].update(hyperpod_cluster_arn="training"),
        "truestep.clusters[0].hyperpod_cluster_arn: 'training' is not valid here; it looks like 'arn:aws:sagemaker:",
    ),
    (
        lambda s: s["clusters"][0].update(checkpoint_buckets=["s3://bucket/x"]),
        "truestep.clusters[0].checkpoint_buckets[0]: 's3://bucket/x' is not a bucket name",
    ),
    (
        lambda s: s["clusters"][0].update(checkpoint_buckets=["bucket/*"]),
        "truestep.clusters[0].checkpoint_buckets[0]: ",
    ),
    (lambda s: s["clusters"][0].pop("training_namespaces"), "truestep.clusters[0].training_namespaces: missing"),
    (lambda s: s["clusters"][0].update(training_namespaces=[]), "truestep.clusters[0].training_namespaces: empty"),
    *(
        (
            _namespaces(name),
            f"truestep.clusters[0].training_namespaces[0]: {name!r} is no Kubernetes namespace: 1 to 63",
        )
        for name in ("", "Research", "team_a", "a.b", "-a", "a-", "*", "a" * 64, "research\n")
    ),
    *(
        (_namespaces(name), f"truestep.clusters[0].training_namespaces[0]: {name!r} belongs to the cluster itself")
        for name in ("kube-system", "kube-public", "aws-hyperpod")
    ),
    (_namespaces("a", "b", "a"), "training_namespaces: 'a' is listed twice"),
    (lambda s: s["clusters"][0].update(amp_workspace_arn="ws-1"), "truestep.clusters[0].amp_workspace_arn: "),
    (lambda s: s.update(approver_emails=["nobody"]), "truestep.approver_emails[0]: "),
    (lambda s: s.update(training_account_ids=["42"]), "truestep.training_account_ids[0]: "),
    (lambda s: s.update(log_retention_days=8), "truestep.log_retention_days: "),
    (lambda s: s.update(deletion_protection="no"), "truestep.deletion_protection: "),
    (
        lambda s: s.update(network={"subnet_ids": [], "security_group_ids": ["sg-10000000"]}),
        "truestep.network.subnet_ids: ",
    ),
    (lambda s: s.update(policy={"dry_runn": True}), "'dry_runn'"),
    (lambda s: s.update(policy={"clusters": {OTHER_ARN: {}}}), f"policy: overrides {OTHER_ARN}"),
    (lambda s: s.update(existing_topic_key_arn="arn:aws:kms:us-west-2:111122223333:key/1"), "existing_topic_arn"),
    (lambda s: s["clusters"].append(copy.deepcopy(s["clusters"][0])), "is listed twice"),
    (lambda s: s["clusters"][0].update(checkpoint_buckets=["acme-ckpt/llama-?"]), "wildcards"),
    (lambda s: s["clusters"][0].update(checkpoint_buckets=["acme-ckpt/${aws:username}"]), "wildcards"),
    (lambda s: s.update(existing_topic_arn="arn:aws:sns:us-east-2:111122223333:oncall"), "where the stack's alarms"),
    (lambda s: s.update(existing_topic_arn="arn:aws:sns:us-west-2:111122223333:oncall.fifo"), "is FIFO"),
    (lambda s: s.update(policy={"clusters": {"arn:x": True}}), "as an object"),
]


@pytest.mark.parametrize(("place", "inside"), [("ckpt", "ckpt/moe"), ("ckpt/a", "ckpt/a"), ("ckpt/a", "ckpt/a/b")])
def test_checkpoints_of_one_cluster_do_not_lie_within_anothers(
    place: str, inside: str, cluster: dict[str, Any]
) -> None:
    other = {
        **cluster,
        "hyperpod_cluster_arn": cluster["hyperpod_cluster_arn"][:-12] + "zzzzzzzzzzzz",
        "hyperpod_cluster_name": "other",
        "eks_cluster_name": "other-eks",
    }
    clusters = [{**cluster, "checkpoint_buckets": [inside]}, {**other, "checkpoint_buckets": [place]}]
    with pytest.raises(ConfigurationError, match="prefix of its own"):
        parse(clusters=clusters)
    parse(clusters=[clusters[0], {**other, "checkpoint_buckets": ["ckpt-other", "ckpt/ab"]}])


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_a_wrong_setting_is_named(
    spoil: Callable[[dict[str, Any]], object], message: str, cluster: dict[str, Any]
) -> None:
    section: dict[str, Any] = {"clusters": [cluster]}
    spoil(section)
    with pytest.raises(ConfigurationError) as caught:
        parse(**section)
    assert message in str(caught.value)


def test_all_wrong_settings_are_named_at_once(cluster: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(clusters=[{**cluster, "eks_cluster_name": ""}], stage="")
    assert "truestep.stage: " in str(caught.value)
    assert "truestep.clusters[0].eks_cluster_name: " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3, "a heading, and a line a mistake"


@pytest.mark.parametrize("context", [{}, {"truestep": None}, {"truestep": []}])
def test_a_context_without_settings_is_refused(context: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="truestep"):
        parse_settings(context)


def test_the_query_url_follows_from_the_workspace(cluster: dict[str, Any]) -> None:
    arn = "arn:aws:aps:eu-west-1:111122223333:workspace/ws-1a"
    (parsed,) = parse(clusters=[{**cluster, "amp_workspace_arn": arn}]).clusters
    assert parsed.query_url == "https://aps-workspaces.eu-west-1.amazonaws.com/workspaces/ws-1a"


def test_the_workspace_follows_from_its_query_url(cluster: dict[str, Any]) -> None:
    url = "https://aps-workspaces.eu-west-1.amazonaws.com/workspaces/ws-1a"
    (parsed,) = parse(clusters=[{**cluster, "amp_query_url": url}]).clusters
    assert parsed.workspace_arn == "arn:aws:aps:eu-west-1:111122223333:workspace/ws-1a"


def test_another_prometheus_needs_no_workspace(cluster: dict[str, Any]) -> None:
    (parsed,) = parse(clusters=[{**cluster, "amp_query_url": "http://127.0.0.1:9090/workspaces/ws-1"}]).clusters
    assert parsed.workspace_arn is None


def test_two_names_for_different_workspaces_are_refused(cluster: dict[str, Any]) -> None:
    names = {
        "amp_query_url": "https://aps-workspaces.eu-west-1.amazonaws.com/workspaces/ws-1a",
        "amp_workspace_arn": "arn:aws:aps:eu-west-1:111122223333:workspace/ws-2b",
    }
    with pytest.raises(ConfigurationError, match="different workspaces"):
        parse(clusters=[{**cluster, **names}])


def test_functions_and_permissions_get_the_same_locations(cluster: dict[str, Any]) -> None:
    settings = parse(clusters=[{**cluster, "checkpoint_buckets": ["one/a", "one/b/", "two"]}])
    told = json.loads(clusters_document(settings))[cluster["hyperpod_cluster_arn"]]["checkpoint_buckets"]
    assert told == ["one/a", "one/b", "two"]
    assert checkpoint_object_arns(settings.clusters) == [f"arn:aws:s3:::{location}/*" for location in told]
