"""Create, read, list, delete: the answers that the recovery's code is written against."""

from __future__ import annotations

from typing import Any

import pytest
from lightkube import ApiError, Client
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Pod
from lightkube.types import PatchType

from tests.adapters.kubernetes_standin.running_cluster import TRAINING_JOB, RunningCluster


def job(name: str, **run_policy: Any) -> Any:
    template = {"spec": {"containers": [{"name": "trainer", "command": ["true"]}]}}
    return TRAINING_JOB(
        metadata={"name": name},
        spec={
            "replicaSpecs": [{"name": "worker", "replicas": 1, "template": template}],
            "runPolicy": {"suspend": True, **run_policy},
        },
    )


def pod(name: str, node: str = "no-kubelet-here", **labels: str) -> Pod:
    return Pod(
        metadata=ObjectMeta(name=name, labels=labels),
        spec=PodSpec(nodeName=node, containers=[Container(name="c", command=["true"])]),
    )


def config_map(name: str, **data: str) -> ConfigMap:
    return ConfigMap(metadata=ObjectMeta(name=name), data=data)


def refusal(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str]:
    return error.value.status.code, error.value.status.reason


@pytest.fixture
def bare_node(cluster: RunningCluster) -> str:
    """A node that no instance stands for, so no kubelet acts on its pods."""
    with cluster.http() as client:
        client.post("/api/v1/nodes", json={"metadata": {"name": "no-kubelet-here"}})
    return "no-kubelet-here"


def test_creating_a_name_that_exists_is_409(kubernetes: Client) -> None:
    kubernetes.create(config_map("taken"))
    with pytest.raises(ApiError) as refused:
        kubernetes.create(config_map("taken"))
    assert refusal(refused) == (409, "AlreadyExists")


def test_a_missing_object_is_404_with_its_name(kubernetes: Client) -> None:
    with pytest.raises(ApiError) as refused:
        kubernetes.get(ConfigMap, "absent")
    assert refusal(refused) == (404, "NotFound")
    assert refused.value.status.message == 'configmaps "absent" not found'


def test_a_missing_namespace_is_404(kubernetes: Client) -> None:
    with pytest.raises(ApiError) as refused:
        kubernetes.create(config_map("a"), namespace="nowhere")
    assert refusal(refused) == (404, "NotFound")
    assert refused.value.status.message == 'namespaces "nowhere" not found'


@pytest.mark.parametrize(
    "path", ["/apis/kueue.x-k8s.io/v1beta1/namespaces/default/topologies", "/api/v1/pods/a", "/api/v2/nodes"]
)
def test_an_unserved_path_is_404(cluster: RunningCluster, path: str) -> None:
    with cluster.http() as client:
        answer = client.get(path)
    assert (answer.status_code, answer.json()["kind"]) == (404, "Status")


@pytest.mark.parametrize("metadata", [{"name": "other"}, {"name": "mismatched", "namespace": "kube-system"}])
def test_a_name_or_namespace_other_than_the_urls_is_400(
    cluster: RunningCluster, kubernetes: Client, metadata: dict[str, str]
) -> None:
    with cluster.http() as client:
        client.post("/api/v1/namespaces/default/configmaps", json={"metadata": {"name": "mismatched"}})
        answer = client.put("/api/v1/namespaces/default/configmaps/mismatched", json={"metadata": metadata})
    assert (answer.status_code, answer.json()["reason"]) == (400, "BadRequest")


def test_a_custom_resource_refuses_a_strategic_patch_with_415(kubernetes: Client) -> None:
    kubernetes.create(job("strategic"))
    patch = {"spec": {"runPolicy": {"suspend": True}}}
    with pytest.raises(ApiError) as refused:
        kubernetes.patch(TRAINING_JOB, "strategic", patch, patch_type=PatchType.STRATEGIC)
    assert refusal(refused) == (415, "UnsupportedMediaType")


def test_a_custom_resource_needs_a_version_to_be_replaced(kubernetes: Client) -> None:
    kubernetes.create(job("unversioned"))
    with pytest.raises(ApiError) as refused:
        kubernetes.replace(job("unversioned"))
    assert refusal(refused) == (422, "Invalid")


def test_the_generation_rises_on_a_spec_change_only(kubernetes: Client) -> None:
    created = kubernetes.create(job("generations"))
    assert created["metadata"]["generation"] == 1
    labelled = kubernetes.patch(
        TRAINING_JOB, "generations", {"metadata": {"labels": {"a": "b"}}}, patch_type=PatchType.MERGE
    )
    assert labelled["metadata"]["generation"] == 1
    changed = kubernetes.patch(
        TRAINING_JOB, "generations", {"spec": {"runPolicy": {"jobMaxRetryCount": 3}}}, patch_type=PatchType.MERGE
    )
    assert changed["metadata"]["generation"] == 2


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"runPolicy": {"suspend": "yes"}}, "spec.runPolicy.suspend"),
        ({"runPolicy": {"jobMaxRetryCount": -1}}, "spec.runPolicy.jobMaxRetryCount"),
        ({"runPolicy": {"cleanPodPolicy": "Some"}}, "spec.runPolicy.cleanPodPolicy"),
        ({"replicaSpecs": []}, "spec.replicaSpecs"),
        ({"nprocPerNode": 1}, "spec.nprocPerNode"),
        ({"nprocPerNode": "8"}, "spec.nprocPerNode"),
    ],
)
def test_a_job_that_breaks_its_schema_is_422_and_names_the_field(
    kubernetes: Client, spec: dict[str, Any], field: str
) -> None:
    body = job("broken")
    body["spec"].update(spec)
    with pytest.raises(ApiError) as refused:
        kubernetes.create(body)
    assert refusal(refused) == (422, "Invalid")
    assert [cause.field for cause in refused.value.status.details.causes] == [field]


def test_a_scheduled_pod_stays_with_a_deletion_timestamp_until_grace_zero(kubernetes: Client, bare_node: str) -> None:
    kubernetes.create(pod("lingering"))
    kubernetes.delete(Pod, "lingering")
    assert kubernetes.get(Pod, "lingering").metadata.deletionTimestamp is not None
    kubernetes.delete(Pod, "lingering", grace_period=0)
    with pytest.raises(ApiError) as refused:
        kubernetes.get(Pod, "lingering")
    assert refusal(refused) == (404, "NotFound")


def test_a_delete_with_another_uid_is_a_conflict(cluster: RunningCluster, kubernetes: Client) -> None:
    kubernetes.create(config_map("recreated"))
    options = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    with cluster.http() as client:
        answer = client.request("DELETE", "/api/v1/namespaces/default/configmaps/recreated", json=options)
    assert (answer.status_code, answer.json()["reason"]) == (409, "Conflict")
    assert kubernetes.get(ConfigMap, "recreated")


def test_finalizers_keep_a_deleted_object_until_they_are_cleared(kubernetes: Client) -> None:
    body = job("finalized")
    body["metadata"]["finalizers"] = ["example.com/wait"]
    kubernetes.create(body)
    kubernetes.delete(TRAINING_JOB, "finalized")
    assert kubernetes.get(TRAINING_JOB, "finalized")["metadata"]["deletionTimestamp"]
    kubernetes.patch(TRAINING_JOB, "finalized", {"metadata": {"finalizers": None}}, patch_type=PatchType.MERGE)
    with pytest.raises(ApiError) as refused:
        kubernetes.get(TRAINING_JOB, "finalized")
    assert refusal(refused) == (404, "NotFound")


def test_a_running_pods_spec_cannot_be_changed(kubernetes: Client, bare_node: str) -> None:
    kubernetes.create(pod("fixed"))
    with pytest.raises(ApiError) as refused:
        kubernetes.patch(Pod, "fixed", {"spec": {"nodeName": "elsewhere"}})
    assert refusal(refused) == (422, "Invalid")
    assert kubernetes.patch(Pod, "fixed", {"metadata": {"labels": {"a": "b"}}}).metadata.labels == {"a": "b"}


def test_label_and_field_selectors_select(kubernetes: Client, bare_node: str) -> None:
    for name, team in (("s1", "red"), ("s2", "blue"), ("s3", "green")):
        kubernetes.create(pod(name, team=team, suite="selectors"))

    def names(**query: Any) -> list[str]:
        return [item.metadata.name for item in kubernetes.list(Pod, **query)]

    assert names(labels={"suite": "selectors", "team": "red"}) == ["s1"]
    assert names(labels={"suite": "selectors"}) == ["s1", "s2", "s3"]
    assert names(labels={"team": ["red", "blue"]}) == ["s1", "s2"]
    assert names(fields={"metadata.name": "s2"}) == ["s2"]
    assert set(names(fields={"spec.nodeName": bare_node})) >= {"s1", "s2", "s3"}
    assert names(fields={"spec.nodeName": "absent"}) == []


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("suite=sets", {"a", "b", "c"}),
        ("suite==sets,tier!=gold", {"b", "c"}),
        ("suite=sets,tier in (gold, silver)", {"a", "b"}),
        ("suite=sets,tier notin (gold)", {"b", "c"}),
        ("suite=sets,tier", {"a", "b"}),
        ("suite=sets,!tier", {"c"}),
        ("suite=absent", set()),
    ],
)
def test_every_form_of_label_selector_selects(cluster: RunningCluster, selector: str, selected: set[str]) -> None:
    with cluster.http() as client:
        for name, labels in (("a", {"tier": "gold"}), ("b", {"tier": "silver"}), ("c", {})):
            body = {"metadata": {"name": name, "labels": {"suite": "sets", **labels}}}
            client.post("/api/v1/namespaces/default/configmaps", json=body)
        answer = client.get("/api/v1/namespaces/default/configmaps", params={"labelSelector": selector})
    assert {item["metadata"]["name"] for item in answer.json()["items"]} == selected


@pytest.mark.parametrize("selector", ["a=b=c", "a in b", "=b"])
def test_a_label_selector_that_cannot_be_read_is_400(cluster: RunningCluster, selector: str) -> None:
    with cluster.http() as client:
        answer = client.get("/api/v1/nodes", params={"labelSelector": selector})
    assert (answer.status_code, answer.json()["reason"]) == (400, "BadRequest")


def test_an_unsupported_field_selector_is_400(cluster: RunningCluster) -> None:
    with cluster.http() as client:
        answer = client.get("/api/v1/nodes", params={"fieldSelector": "spec.podCIDR=x"})
    assert (answer.status_code, answer.json()["message"]) == (400, "field label not supported: spec.podCIDR")


def test_a_limited_list_continues_to_its_end(cluster: RunningCluster) -> None:
    with cluster.http() as client:
        client.post("/api/v1/namespaces", json={"metadata": {"name": "pages"}})
        for index in range(5):
            client.post("/api/v1/namespaces/pages/configmaps", json={"metadata": {"name": f"c{index}"}})
        seen, token, remaining = [], "", []
        while True:
            page = client.get("/api/v1/namespaces/pages/configmaps", params={"limit": 2, "continue": token}).json()
            seen += [item["metadata"]["name"] for item in page["items"]]
            token = page["metadata"].get("continue", "")
            if not token:
                break
            remaining.append(page["metadata"]["remainingItemCount"])
        assert (seen, remaining) == (["c0", "c1", "c2", "c3", "c4"], [3, 1])
        broken = client.get("/api/v1/namespaces/pages/configmaps", params={"limit": 2, "continue": "?"})
        assert broken.status_code == 400
