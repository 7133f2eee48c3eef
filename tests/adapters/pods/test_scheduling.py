from __future__ import annotations

from typing import Any

import pytest

from local_stack.cluster.kubernetes.resources import NODES, PODS
from tests.adapters.kubernetes_standin.running_cluster import RunningCluster
from tests.adapters.pods.training import HOLD, Job


def patch_node(cluster: RunningCluster, name: str, spec: dict[str, Any]) -> None:
    with cluster.http() as client:
        headers = {"Content-Type": "application/merge-patch+json"}
        assert client.patch(f"/api/v1/nodes/{name}", headers=headers, json={"spec": spec}).is_success


def settled_nodes(cluster: RunningCluster) -> list[str]:
    cluster.wait_until(
        lambda: not any(node["spec"].get("taints") for node in cluster.objects(NODES).values()), "no taint is left"
    )
    return sorted(cluster.objects(NODES))


def unschedulable_message(pod: dict[str, Any]) -> str:
    conditions = pod["status"].get("conditions", [])
    return next((item["message"] for item in conditions if item.get("reason") == "Unschedulable"), "")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"unschedulable": True}, "1 node(s) were unschedulable"),
        (
            {"taints": [{"key": "truestep.ai/quarantine", "value": "i1", "effect": "NoSchedule"}]},
            "1 node(s) had untolerated taint {truestep.ai/quarantine: i1}",
        ),
    ],
)
def test_a_quarantined_node_gets_no_pod_until_it_is_released(
    cluster: RunningCluster, spec: dict[str, Any], words: str
) -> None:
    quarantined = settled_nodes(cluster)[0]
    patch_node(cluster, quarantined, spec)
    job = Job(cluster).create(HOLD)
    waiting = cluster.wait_until(
        lambda: [pod for pod in job.pods().values() if unschedulable_message(pod)], "one pod waits"
    )
    assert words in unschedulable_message(waiting[0])
    assert "2 node(s) already run a training pod" in unschedulable_message(waiting[0])
    assert quarantined not in {pod["spec"].get("nodeName") for pod in job.pods().values()}
    patch_node(cluster, quarantined, {"unschedulable": None, "taints": None})
    job.wait_for("Running")
    assert quarantined in {pod["spec"]["nodeName"] for pod in job.pods().values()}


def test_a_toleration_and_a_selector_put_a_pod_on_a_quarantined_node(cluster: RunningCluster) -> None:
    quarantined = settled_nodes(cluster)[2]
    patch_node(cluster, quarantined, {"taints": [{"key": "truestep.ai/quarantine", "effect": "NoSchedule"}]})
    job = Job(cluster, "confirm").create(
        HOLD,
        replicas=1,
        tolerations=[{"key": "truestep.ai/quarantine", "operator": "Exists"}],
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [quarantined]}]}
                    ]
                }
            }
        },
    )
    job.wait_for("Running")
    assert [pod["spec"]["nodeName"] for pod in job.pods().values()] == [quarantined]


def test_gpus_that_are_taken_are_not_given_twice(cluster: RunningCluster) -> None:
    def pod(name: str) -> dict[str, Any]:
        container = {
            "name": "c",
            "command": ["python", "-c", "import time; time.sleep(60)"],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        }
        return {"metadata": {"name": name}, "spec": {"containers": [container]}}

    for index in range(4):
        cluster.cluster.registry.create(PODS, "default", pod(f"p{index}"))
    waiting = cluster.wait_until(
        lambda: [pod for pod in cluster.objects(PODS).values() if "Insufficient" in unschedulable_message(pod)]
    )
    cluster.wait_until(
        lambda: sum(item["status"]["phase"] == "Running" for item in cluster.objects(PODS).values()) == 3
    )
    assert "3 Insufficient nvidia.com/gpu" in unschedulable_message(waiting[0])


def test_an_occupied_cluster_keeps_a_second_job_waiting_until_the_first_is_suspended(
    cluster: RunningCluster,
) -> None:
    first = Job(cluster, "first").create(HOLD)
    first.wait_for("Running")
    second = Job(cluster, "second").create(HOLD, replicas=1)
    cluster.wait_until(lambda: any(map(unschedulable_message, second.pods().values())), "the second job's pod waits")
    first.suspend()
    second.wait_for("Running")
