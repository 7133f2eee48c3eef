"""Jobs of a single pod, as the recovery's confirmation is one: where it may run, its last words, and its end."""

from __future__ import annotations

from typing import Any

import pytest

from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.resources import JOBS, PODS
from tests.adapters.kubernetes_standin.running_cluster import RunningCluster
from tests.adapters.pods.test_scheduling import patch_node, settled_nodes, unschedulable_message

WRITE = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('x' * 5000); sys.exit(1)"


def on_node(name: str) -> dict[str, Any]:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def create(
    cluster: RunningCluster, program: str, *arguments: str, job: dict[str, Any] | None = None, **pod: Any
) -> None:
    container = {"name": "confirm", "command": ["python3", "-c", program, *arguments], **pod.pop("container", {})}
    spec = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1, **pod}
    body = {"metadata": {"name": "confirm"}, "spec": {"backoffLimit": 0, **(job or {}), "template": {"spec": spec}}}
    cluster.cluster.registry.create(JOBS, "default", body)


def last_words(cluster: RunningCluster) -> dict[str, Any]:
    """The terminated state of the Job's only container, once it has ended."""

    def ended() -> Any:
        pod = cluster.objects(PODS).get("confirm-0", {})
        statuses = pod.get("status", {}).get("containerStatuses") or [{}]
        return statuses[0].get("state", {}).get("terminated")

    found: dict[str, Any] = cluster.wait_until(ended, "the container to end")
    return found


def failure(cluster: RunningCluster) -> str:
    conditions = cluster.objects(JOBS)["confirm"].get("status", {}).get("conditions", [])
    return next((item["reason"] for item in conditions if item["type"] == "Failed" and item["status"] == "True"), "")


def test_what_a_container_leaves_at_its_message_path_is_in_its_status_cut_at_4096_bytes(
    cluster: RunningCluster,
) -> None:
    create(cluster, WRITE, "/dev/termination-log")
    ended = last_words(cluster)
    assert (ended["exitCode"], ended["message"]) == (1, "x" * 4096)


@pytest.mark.parametrize(("policy", "message"), [("FallbackToLogsOnError", "the end\n"), ("File", "")])
def test_one_that_dies_without_a_message_leaves_the_end_of_its_log_where_it_asked_for_that(
    cluster: RunningCluster, policy: str, message: str
) -> None:
    program = "import sys; print('a' * 3000); print('the end'); sys.exit(2)"
    create(cluster, program, container={"terminationMessagePolicy": policy})
    said = last_words(cluster).get("message", "")
    assert said.endswith(message)
    assert bool(said) == bool(message)
    assert len(said) <= 2048


def test_a_cordon_keeps_a_pod_out_unless_it_tolerates_it(cluster: RunningCluster) -> None:
    name = settled_nodes(cluster)[0]
    patch_node(cluster, name, {"unschedulable": True})
    create(cluster, "", affinity=on_node(name))
    cluster.wait_until(
        lambda: "were unschedulable" in unschedulable_message(cluster.objects(PODS).get("confirm-0", {"status": {}})),
        "the pod to be refused",
    )
    cluster.cluster.registry.delete(JOBS, "default", "confirm")
    cluster.wait_until(lambda: not cluster.objects(PODS), "its pod to go")
    tolerated = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}]
    create(cluster, "", affinity=on_node(name), tolerations=tolerated)
    assert last_words(cluster)["exitCode"] == 0
    assert cluster.objects(PODS)["confirm-0"]["spec"]["nodeName"] == name


def test_a_job_that_runs_longer_than_its_deadline_has_failed_and_loses_its_pod(cluster: RunningCluster) -> None:
    create(cluster, "import time; time.sleep(600)", job={"activeDeadlineSeconds": 1})
    cluster.wait_until(lambda: failure(cluster) == "DeadlineExceeded", "the deadline")
    cluster.wait_until(lambda: not cluster.objects(PODS), "its pod to go")


def test_an_ended_job_goes_by_itself_and_takes_its_pod_along(cluster: RunningCluster) -> None:
    create(cluster, "", job={"ttlSecondsAfterFinished": 0})
    cluster.wait_until(lambda: not cluster.objects(JOBS) and not cluster.objects(PODS), "Job and pod to go")


def test_a_field_of_a_node_is_matched_by_one_value_alone(cluster: RunningCluster) -> None:
    affinity = on_node("a")
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    terms[0]["matchFields"][0]["values"].append("b")
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}], "affinity": affinity}}
    with pytest.raises(ApiError, match="only one value"):
        cluster.cluster.registry.create(PODS, "default", pod)
