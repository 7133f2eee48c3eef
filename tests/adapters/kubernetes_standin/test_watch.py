from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from tests.adapters.kubernetes_standin.running_cluster import RunningCluster, running_cluster

PATH = "/api/v1/namespaces/default/configmaps"


def create(client: httpx2.Client, name: str, **labels: str) -> dict[str, Any]:
    body: dict[str, Any] = client.post(PATH, json={"metadata": {"name": name, "labels": labels}}).json()
    return body


def relabel(client: httpx2.Client, name: str, **labels: str | None) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    assert client.patch(f"{PATH}/{name}", headers=headers, json={"metadata": {"labels": labels}}).is_success


def watched(client: httpx2.Client, **query: str) -> list[tuple[str, str]]:
    """Everything that a watch of at most a second saw: (type, name)."""
    answer = client.get(PATH, params={"watch": "true", "timeoutSeconds": "1", **query})
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    return [(line["type"], line["object"].get("metadata", {}).get("name", "")) for line in lines]


@pytest.fixture
def admin(cluster: RunningCluster) -> Iterator[httpx2.Client]:
    with cluster.http() as client:
        yield client


def test_an_old_version_replays_what_happened_since(admin: httpx2.Client) -> None:
    version = create(admin, "replayed")["metadata"]["resourceVersion"]
    relabel(admin, "replayed", a="b")
    admin.delete(f"{PATH}/replayed")
    assert watched(admin, resourceVersion=version) == [("MODIFIED", "replayed"), ("DELETED", "replayed")]


def test_without_a_version_existing_objects_come_first(admin: httpx2.Client) -> None:
    create(admin, "existing", suite="first")
    assert watched(admin, labelSelector="suite=first") == [("ADDED", "existing")]


def test_leaving_and_entering_a_selector_looks_like_deletion_and_addition(admin: httpx2.Client) -> None:
    version = create(admin, "moving", stage="in")["metadata"]["resourceVersion"]
    relabel(admin, "moving", stage="out")
    relabel(admin, "moving", stage="in")
    seen = watched(admin, resourceVersion=version, labelSelector="stage=in")
    assert seen == [("DELETED", "moving"), ("ADDED", "moving")]


def test_a_waiting_watch_is_woken_by_the_change(kubernetes: Client) -> None:
    version = kubernetes.create(ConfigMap(metadata=ObjectMeta(name="woken"))).metadata.resourceVersion
    seen: list[tuple[str, str]] = []

    def follow() -> None:
        for kind, body in kubernetes.watch(ConfigMap, fields={"metadata.name": "woken"}, resource_version=version):
            seen.append((kind, body.metadata.name))
            return

    follower = threading.Thread(target=follow)
    follower.start()
    kubernetes.patch(ConfigMap, "woken", {"data": {"a": "1"}})
    follower.join(timeout=10)
    assert seen == [("MODIFIED", "woken")]


def test_a_version_beyond_the_history_is_told_410(tmp_path: Path) -> None:
    with running_cluster(tmp_path, watch_history_limit=20) as cluster, cluster.http() as client:
        for index in range(30):
            create(client, f"c{index}")
        answer = client.get(PATH, params={"watch": "true", "resourceVersion": "2", "timeoutSeconds": "1"})
        (line,) = [json.loads(text) for text in answer.text.splitlines()]
        assert (line["type"], line["object"]["code"], line["object"]["reason"]) == ("ERROR", 410, "Expired")


def test_a_restarted_server_keeps_objects_and_replays_their_history(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster, cluster.http() as client:
        created = create(client, "kept")
        relabel(client, "kept", a="b")
    with running_cluster(tmp_path) as cluster, cluster.http() as client:
        kept = client.get(f"{PATH}/kept").json()
        assert kept["metadata"]["uid"] == created["metadata"]["uid"]
        seen = watched(client, resourceVersion=created["metadata"]["resourceVersion"])
        assert seen == [("MODIFIED", "kept")]
