"""Writes to nodes, as measured on a real API server: what the quarantine of a node depends on."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from lightkube import ApiError, Client
from lightkube.models.core_v1 import NodeSpec, Taint
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node
from lightkube.types import PatchType

from tests.adapters.kubernetes_standin.running_cluster import RunningCluster

HYPERPOD_TAINT = Taint(key="sagemaker.amazonaws.com/node-health-status", value="Unschedulable", effect="NoSchedule")
OURS = {"key": "truestep.ai/quarantine", "value": "incident-1", "effect": "NoSchedule"}


@pytest.fixture
def node(kubernetes: Client) -> Node:
    name = f"node-{uuid.uuid4().hex[:8]}"
    return kubernetes.create(Node(metadata=ObjectMeta(name=name), spec=NodeSpec(taints=[HYPERPOD_TAINT])))


def taint_keys(node: Node) -> list[str]:
    return [taint.key for taint in node.spec.taints or []]


def name_of(node: Node) -> str:
    assert node.metadata is not None
    assert node.metadata.name is not None
    return node.metadata.name


def test_a_new_node_gets_the_not_ready_taint(node: Node) -> None:
    assert taint_keys(node) == [HYPERPOD_TAINT.key, "node.kubernetes.io/not-ready"]


@pytest.mark.parametrize("kind", [PatchType.STRATEGIC, PatchType.MERGE])
def test_a_merge_patch_of_taints_replaces_the_whole_list(kubernetes: Client, node: Node, kind: PatchType) -> None:
    patched = kubernetes.patch(Node, name_of(node), {"spec": {"taints": [OURS]}}, patch_type=kind)
    assert HYPERPOD_TAINT.key not in taint_keys(patched)
    assert OURS["key"] in taint_keys(patched)


def test_a_json_patch_appends_a_taint(kubernetes: Client, node: Node) -> None:
    add = [{"op": "add", "path": "/spec/taints/-", "value": OURS}]
    patched = kubernetes.patch(Node, name_of(node), add, patch_type=PatchType.JSON)
    assert taint_keys(patched)[0] == HYPERPOD_TAINT.key
    assert taint_keys(patched)[-1] == OURS["key"]


@pytest.mark.parametrize(
    ("taint", "field"),
    [
        ({"key": HYPERPOD_TAINT.key, "value": "other", "effect": "NoSchedule"}, "spec.taints[2]"),
        ({"key": "a key", "effect": "NoSchedule"}, "spec.taints[2].key"),
        ({"key": "a", "effect": "Never"}, "spec.taints[2].effect"),
    ],
)
def test_a_bad_taint_is_422_with_its_cause(kubernetes: Client, node: Node, taint: dict[str, str], field: str) -> None:
    add = [{"op": "add", "path": "/spec/taints/-", "value": taint}]
    with pytest.raises(ApiError) as refused:
        kubernetes.patch(Node, name_of(node), add, patch_type=PatchType.JSON)
    status = refused.value.status
    assert (status.code, status.reason) == (422, "Invalid")
    assert [cause.field for cause in status.details.causes] == [field]
    assert taint_keys(kubernetes.get(Node, name_of(node))) == taint_keys(node)


@pytest.mark.parametrize("kind", [PatchType.STRATEGIC, PatchType.MERGE])
def test_a_patch_with_a_stale_version_is_a_conflict(kubernetes: Client, node: Node, kind: PatchType) -> None:
    stale = node.metadata.resourceVersion
    kubernetes.patch(Node, name_of(node), {"metadata": {"labels": {"a": "1"}}})
    patch = {"metadata": {"resourceVersion": stale}, "spec": {"unschedulable": True}}
    with pytest.raises(ApiError) as refused:
        kubernetes.patch(Node, name_of(node), patch, patch_type=kind)
    assert (refused.value.status.code, refused.value.status.reason) == (409, "Conflict")


def test_a_failed_json_patch_test_is_422_and_changes_nothing(kubernetes: Client, node: Node) -> None:
    operations = [
        {"op": "replace", "path": "/spec/taints", "value": []},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
    ]
    with pytest.raises(ApiError) as refused:
        kubernetes.patch(Node, name_of(node), operations, patch_type=PatchType.JSON)
    status = refused.value.status
    assert (status.code, status.reason) == (422, "Invalid")
    assert status.message == "the server rejected our request due to an error in our request"
    assert kubernetes.get(Node, name_of(node)) == node


def test_a_json_patch_guarded_by_the_current_version_applies(kubernetes: Client, node: Node) -> None:
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": node.metadata.resourceVersion},
        {"op": "add", "path": "/spec/unschedulable", "value": True},
    ]
    patched = kubernetes.patch(Node, name_of(node), operations, patch_type=PatchType.JSON)
    assert patched.spec.unschedulable is True
    assert patched.metadata.resourceVersion != node.metadata.resourceVersion


def test_a_patch_that_changes_nothing_keeps_the_version(kubernetes: Client, node: Node) -> None:
    patched = kubernetes.patch(Node, name_of(node), {"metadata": {"labels": None}})
    assert patched.metadata.resourceVersion == node.metadata.resourceVersion


def test_a_replace_without_a_version_is_unconditional_on_nodes(kubernetes: Client, node: Node) -> None:
    kubernetes.patch(Node, name_of(node), {"metadata": {"labels": {"a": "1"}}})
    node.metadata.resourceVersion = None
    node.spec.unschedulable = True
    assert kubernetes.replace(node).spec.unschedulable is True


def test_status_is_ignored_on_the_main_resource_and_conditions_merge_by_type(kubernetes: Client, node: Node) -> None:
    ready = {"type": "Ready", "status": "False", "reason": "Test"}
    ignored = kubernetes.patch(Node, name_of(node), {"status": {"conditions": [ready]}})
    assert ignored.status is None or not ignored.status.conditions
    kubernetes.patch(Node.Status, name_of(node), {"status": {"conditions": [ready]}})
    pressure = {"type": "DiskPressure", "status": "False"}
    merged = kubernetes.patch(Node.Status, name_of(node), {"status": {"conditions": [pressure]}})
    assert {condition.type for condition in merged.status.conditions} == {"Ready", "DiskPressure"}
    changed = kubernetes.patch(Node.Status, name_of(node), {"status": {"conditions": [{**ready, "reason": "Other"}]}})
    assert [item.reason for item in changed.status.conditions if item.type == "Ready"] == ["Other"]


def test_dry_run_answers_200_and_stores_nothing(cluster: RunningCluster, node: Node) -> None:
    with cluster.http() as client:
        answer = client.patch(
            f"/api/v1/nodes/{name_of(node)}",
            params={"dryRun": "All"},
            headers={"Content-Type": "application/merge-patch+json"},
            json={"spec": {"unschedulable": True}},
        )
        assert (answer.status_code, answer.json()["spec"]["unschedulable"]) == (200, True)
        stored = client.get(f"/api/v1/nodes/{name_of(node)}").json()
        assert "unschedulable" not in stored["spec"]
        created = client.post("/api/v1/nodes", params={"dryRun": "All"}, json={"metadata": {"name": "never-stored"}})
        assert created.status_code == 201
        assert client.get("/api/v1/nodes/never-stored").status_code == 404


@pytest.mark.parametrize("content_type", ["text/yaml", "application/apply-patch+yaml", "application/json"])
def test_an_unknown_patch_type_is_415(cluster: RunningCluster, node: Node, content_type: str) -> None:
    with cluster.http() as client:
        answer = client.patch(f"/api/v1/nodes/{name_of(node)}", headers={"Content-Type": content_type}, content=b"{}")
    assert (answer.status_code, answer.json()["reason"]) == (415, "UnsupportedMediaType")


def test_a_node_says_who_set_its_cordon_last(kubernetes: Client, node: Node) -> None:
    """As documented for field management, not measured: who changes a field owns it, nobody one that is gone."""

    def cordon(value: Any, **who: Any) -> dict[str, dict[str, Any]]:
        patched = kubernetes.patch(Node, name_of(node), {"spec": {"unschedulable": value}}, **who)
        assert patched.metadata is not None
        entries = patched.metadata.managedFields or []
        return {str(entry.manager): dict(entry.fieldsV1 or {})["f:spec"] for entry in entries}

    added = [
        {"op": "add", "path": "/spec/taints/-", "value": OURS},
        {"op": "add", "path": "/spec/unschedulable", "value": True},
    ]
    kubernetes.patch(Node, name_of(node), added, patch_type=PatchType.JSON, field_manager="ours")
    assert cordon(True, field_manager="late") == {"ours": {"f:taints": {}, "f:unschedulable": {}}}, "nothing changed"
    assert cordon(None, field_manager="opener") == {"ours": {"f:taints": {}}}
    assert cordon(True, field_manager="theirs")["theirs"] == {"f:unschedulable": {}}
