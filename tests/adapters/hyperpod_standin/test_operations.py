"""The HyperPod operations through boto3, whose own model checks what comes back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from botocore.exceptions import ClientError

from local_stack.cluster.config import ConfigError
from local_stack.cluster.kubernetes.resources import NODES
from local_stack.cluster.node_state import is_ready, taints_of
from tests.adapters.kubernetes_standin.running_cluster import CLUSTER_ARN, RunningCluster, running_cluster

HEALTH = "sagemaker.amazonaws.com/node-health-status"
CHECK = "sagemaker.amazonaws.com/deep-health-check-status"
SLOW_CHECK = {"health_check_seconds": 30.0}
SLOW_PROVISIONING = {"provisioning_delay_seconds": 30.0}


def nodes_of(sagemaker: Any) -> list[dict[str, Any]]:
    answer = sagemaker.list_cluster_nodes(ClusterName="training", IncludeNodeLogicalIds=True)
    return list(answer["ClusterNodeSummaries"])


def labels_of(cluster: RunningCluster, instance_id: str) -> dict[str, str]:
    return dict(cluster.objects(NODES)[f"hyperpod-{instance_id}"]["metadata"]["labels"])


def check(sagemaker: Any, *instance_ids: str) -> dict[str, Any]:
    configuration: dict[str, Any] = {"InstanceGroupName": "workers", "DeepHealthChecks": ["InstanceStress"]}
    if instance_ids:
        configuration["InstanceIds"] = list(instance_ids)
    answer: dict[str, Any] = sagemaker.start_cluster_health_check(
        ClusterName="training", DeepHealthCheckConfigurations=[configuration]
    )
    return answer


def status_of(sagemaker: Any, instance_id: str) -> str:
    details = sagemaker.describe_cluster_node(ClusterName="training", NodeId=instance_id)["NodeDetails"]
    return str(details["InstanceStatus"]["Status"])


def test_the_cluster_describes_itself_by_name_and_by_arn(sagemaker: Any) -> None:
    by_name = sagemaker.describe_cluster(ClusterName="training")
    by_arn = sagemaker.describe_cluster(ClusterName=CLUSTER_ARN)
    assert by_name["ClusterArn"] == by_arn["ClusterArn"] == CLUSTER_ARN
    assert by_name["NodeRecovery"] == "None"
    assert by_name["Orchestrator"]["Eks"]["ClusterArn"].endswith("cluster/training-eks")
    assert [(group["InstanceGroupName"], group["CurrentCount"]) for group in by_name["InstanceGroups"]] == [
        ("workers", 3)
    ]
    assert [item["ClusterName"] for item in sagemaker.list_clusters()["ClusterSummaries"]] == ["training"]


def test_every_instance_is_a_ready_node_with_hyperpods_labels(cluster: RunningCluster, sagemaker: Any) -> None:
    cluster.wait_until(lambda: not any(taints_of(node) for node in cluster.objects(NODES).values()), "no taint is left")
    instances = nodes_of(sagemaker)
    assert len({item["NodeLogicalId"] for item in instances}) == 3
    for item in instances:
        assert re.fullmatch(r"i-[0-9a-f]{17}", item["InstanceId"])
        node = cluster.objects(NODES)[f"hyperpod-{item['InstanceId']}"]
        assert is_ready(node)
        labels = node["metadata"]["labels"]
        assert labels[HEALTH] == "Schedulable"
        assert labels["node.kubernetes.io/instance-type"] == item["InstanceType"]


def test_the_seed_decides_identities(tmp_path: Path) -> None:
    def identities(name: str, seed: int) -> list[tuple[str, Any]]:
        with running_cluster(tmp_path / name, seed=seed) as cluster:
            nodes = cluster.control("/local/info")[1]["clusters"][0]["nodes"]
            return [(node["instance_id"], node["gpu_uuids"]) for node in nodes]

    assert identities("a", 1) == identities("b", 1)
    assert not set(map(str, identities("a", 1))) & set(map(str, identities("c", 2)))


def test_a_replaced_instance_comes_back_as_another_under_the_same_logical_id(
    cluster: RunningCluster, sagemaker: Any
) -> None:
    old = nodes_of(sagemaker)[1]
    before = cluster.control("/local/info")[1]["clusters"][0]["nodes"]
    answer = sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeIds=[old["InstanceId"]])
    assert answer["Successful"] == [old["InstanceId"]]
    assert f"hyperpod-{old['InstanceId']}" not in cluster.objects(NODES)
    with pytest.raises(ClientError) as refused:
        sagemaker.describe_cluster_node(ClusterName="training", NodeId=old["InstanceId"])
    assert refused.value.response["Error"]["Code"] == "ResourceNotFound"

    def successor() -> Any:
        found = sagemaker.describe_cluster_node(ClusterName="training", NodeLogicalId=old["NodeLogicalId"])
        details = found["NodeDetails"]
        return details if details["InstanceStatus"]["Status"] == "Running" else None

    new = cluster.wait_until(successor, "the replacement runs")
    assert new["InstanceId"] != old["InstanceId"]
    assert cluster.wait_until(lambda: is_ready(cluster.objects(NODES)[f"hyperpod-{new['InstanceId']}"]))
    gpus = {uuid for node in before for uuid in node["gpu_uuids"]}
    (joined,) = [
        node
        for node in cluster.control("/local/info")[1]["clusters"][0]["nodes"]
        if node["instance_id"] == new["InstanceId"]
    ]
    assert not gpus & set(joined["gpu_uuids"])


def test_a_batch_succeeds_in_part(sagemaker: Any) -> None:
    known, unknown = nodes_of(sagemaker)[0]["InstanceId"], "i-0123456789abcdef0"
    answer = sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeIds=[unknown, known])
    assert answer["Successful"] == [known]
    assert [(item["NodeId"], item["ErrorCode"]) for item in answer["Failed"]] == [(unknown, "InstanceIdNotFound")]
    again = sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeIds=[known])
    assert [item["ErrorCode"] for item in again["Failed"]] == ["InstanceIdNotFound"]


@pytest.mark.parametrize("cluster", [SLOW_PROVISIONING], indirect=True)
def test_an_instance_that_is_coming_up_cannot_be_replaced_again(sagemaker: Any) -> None:
    logical = nodes_of(sagemaker)[0]["NodeLogicalId"]
    sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeLogicalIds=[logical])
    again = sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeLogicalIds=[logical])
    assert [item["ErrorCode"] for item in again["FailedNodeLogicalIds"]] == ["InvalidInstanceStatus"]


def test_a_state_directory_of_another_size_is_refused(tmp_path: Path) -> None:
    with running_cluster(tmp_path):
        pass
    larger = {"instance_groups": [{"name": "workers", "count": 4}]}
    with pytest.raises(ConfigError, match="use another state directory"), running_cluster(tmp_path, cluster=larger):
        pass


def test_a_replacement_under_way_is_completed_after_a_restart(tmp_path: Path) -> None:
    with running_cluster(tmp_path, **SLOW_PROVISIONING) as cluster:
        client = cluster.sagemaker()
        logical = nodes_of(client)[0]["NodeLogicalId"]
        client.batch_replace_cluster_nodes(ClusterName="training", NodeLogicalIds=[logical])
        (pending,) = [item["InstanceId"] for item in nodes_of(client) if item["NodeLogicalId"] == logical]
        client.close()
        assert f"hyperpod-{pending}" not in cluster.objects(NODES)
    with running_cluster(tmp_path) as cluster:
        assert cluster.wait_until(lambda: f"hyperpod-{pending}" in cluster.objects(NODES), "the node joined")


@pytest.mark.parametrize("cluster", [SLOW_CHECK], indirect=True)
def test_a_health_check_shows_on_the_node_and_excludes_a_second(cluster: RunningCluster, sagemaker: Any) -> None:
    first, second = (item["InstanceId"] for item in nodes_of(sagemaker)[:2])
    assert check(sagemaker, first)["ClusterArn"] == CLUSTER_ARN
    assert status_of(sagemaker, first) == "DeepHealthCheckInProgress"
    labels = labels_of(cluster, first)
    assert (labels[CHECK], labels[HEALTH]) == ("InProgress", "Unschedulable")
    assert HEALTH in [taint["key"] for taint in taints_of(cluster.objects(NODES)[f"hyperpod-{first}"])]
    assert CHECK not in labels_of(cluster, second)
    with pytest.raises(ClientError) as refused:
        check(sagemaker, second)
    assert refused.value.response["Error"]["Code"] == "ConflictException"


def test_a_passed_check_takes_off_its_own_taint_only(cluster: RunningCluster, sagemaker: Any) -> None:
    instance_id = nodes_of(sagemaker)[0]["InstanceId"]
    theirs = {"key": "truestep.ai/quarantine", "value": "incident-1", "effect": "NoSchedule"}
    with cluster.http() as client:
        client.patch(
            f"/api/v1/nodes/hyperpod-{instance_id}",
            headers={"Content-Type": "application/merge-patch+json"},
            json={"spec": {"taints": [theirs], "unschedulable": True}},
        )
    check(sagemaker, instance_id)
    cluster.wait_until(lambda: labels_of(cluster, instance_id).get(CHECK) == "Passed", "the check passed")
    node = cluster.objects(NODES)[f"hyperpod-{instance_id}"]
    assert [taint["key"] for taint in taints_of(node)] == [theirs["key"]]
    assert node["spec"]["unschedulable"] is True
    assert status_of(sagemaker, instance_id) == "Running"


def test_without_instance_ids_the_whole_group_is_checked(cluster: RunningCluster, sagemaker: Any) -> None:
    check(sagemaker)
    ids = [item["InstanceId"] for item in nodes_of(sagemaker)]
    cluster.wait_until(lambda: all(labels_of(cluster, item).get(CHECK) == "Passed" for item in ids), "all passed")


def test_a_failed_check_leaves_the_node_for_replacement(cluster: RunningCluster, sagemaker: Any) -> None:
    instance_id = nodes_of(sagemaker)[0]["InstanceId"]
    outcome = {"instance_id": instance_id, "outcome": "failed"}
    assert cluster.control("/local/health-check-outcomes", outcome)[0] == 200
    check(sagemaker, instance_id)
    cluster.wait_until(lambda: labels_of(cluster, instance_id).get(CHECK) == "Failed", "the check failed")
    assert labels_of(cluster, instance_id)[HEALTH] == "UnschedulablePendingReplacement"
    assert status_of(sagemaker, instance_id) == "Failure"


@pytest.mark.parametrize("cluster", [{"cluster": {"node_recovery": "Automatic"}}], indirect=True)
def test_with_automatic_recovery_a_failed_check_replaces_the_instance(cluster: RunningCluster, sagemaker: Any) -> None:
    old = nodes_of(sagemaker)[0]
    cluster.control("/local/health-check-outcomes", {"instance_id": old["InstanceId"], "outcome": "failed"})
    check(sagemaker, old["InstanceId"])
    cluster.wait_until(
        lambda: f"hyperpod-{old['InstanceId']}" not in cluster.objects(NODES) and len(cluster.objects(NODES)) == 3,
        "another node stands in",
    )
    assert old["InstanceId"] not in [item["InstanceId"] for item in nodes_of(sagemaker)]


def test_a_skipped_check_changes_nothing(cluster: RunningCluster, sagemaker: Any) -> None:
    instance_id = nodes_of(sagemaker)[0]["InstanceId"]
    cluster.control("/local/health-check-outcomes", {"instance_id": instance_id, "outcome": "skipped"})
    check(sagemaker, instance_id)
    assert CHECK not in labels_of(cluster, instance_id)
    assert status_of(sagemaker, instance_id) == "Running"


def test_a_reboot_keeps_identity_and_fault(cluster: RunningCluster, sagemaker: Any) -> None:
    instance_id = nodes_of(sagemaker)[0]["InstanceId"]
    cluster.control("/local/faults", {"instance_id": instance_id, "fault": {"kind": "bit_flip"}})
    gpus = {
        node["instance_id"]: node["gpu_uuids"] for node in cluster.control("/local/info")[1]["clusters"][0]["nodes"]
    }
    sagemaker.batch_reboot_cluster_nodes(ClusterName="training", NodeIds=[instance_id])
    cluster.wait_until(
        lambda: (
            status_of(sagemaker, instance_id) == "Running"
            and is_ready(cluster.objects(NODES)[f"hyperpod-{instance_id}"])
        ),
        "the node is back",
    )
    (node,) = [
        node for node in cluster.control("/local/info")[1]["clusters"][0]["nodes"] if node["instance_id"] == instance_id
    ]
    assert (node["gpu_uuids"], node["fault"]) == (gpus[instance_id], {"kind": "bit_flip"})


@pytest.mark.parametrize(
    ("call", "arguments", "code"),
    [
        ("describe_cluster", {"ClusterName": "absent"}, "ResourceNotFound"),
        ("describe_cluster_node", {"ClusterName": "training"}, "ValidationException"),
        ("batch_replace_cluster_nodes", {"ClusterName": "training"}, "ValidationException"),
        ("list_cluster_nodes", {"ClusterName": "training", "NextToken": "x"}, "ValidationException"),
        ("delete_cluster", {"ClusterName": "training"}, "UnknownOperationException"),
    ],
)
def test_what_the_service_would_refuse_is_an_error_with_its_code(
    sagemaker: Any, call: str, arguments: dict[str, Any], code: str
) -> None:
    with pytest.raises(ClientError) as refused:
        getattr(sagemaker, call)(**arguments)
    assert refused.value.response["Error"]["Code"] == code


def test_requests_are_held_to_the_services_model(cluster: RunningCluster) -> None:
    with httpx2.Client(base_url=cluster.server.url, trust_env=False) as client:
        headers = {"X-Amz-Target": "SageMaker.BatchReplaceClusterNodes"}
        for body in ({}, {"ClusterName": "training", "NodeIds": "i-1"}, {"ClusterName": "training", "Nodes": []}):
            answer = client.post("/", headers=headers, json=body)
            assert (answer.status_code, answer.json()["__type"]) == (400, "ValidationException")


def test_nodes_are_listed_in_pages(sagemaker: Any) -> None:
    pages = sagemaker.get_paginator("list_cluster_nodes").paginate(
        ClusterName="training", PaginationConfig={"PageSize": 2}
    )
    sizes = [len(page["ClusterNodeSummaries"]) for page in pages]
    assert sizes == [2, 1]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/local/faults", {"fault": {}}, "name the instance by one of"),
        ("/local/faults", {"instance_id": "i-1", "fault": {}}, "GET /local/info lists them"),
        (
            "/local/health-check-outcomes",
            {"node_logical_id": "workers-1", "outcome": "good"},
            "passed, failed, skipped",
        ),
        ("/local/pod-environment", {"A": 1}, "strings"),
    ],
)
def test_a_control_request_that_cannot_be_used_says_why(
    cluster: RunningCluster, path: str, body: Any, words: str
) -> None:
    code, answer = cluster.control(path, body)
    assert code == 400
    assert words in answer["message"]
