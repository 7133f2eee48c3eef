"""The server as a whole: several clusters, requests that are no good, a crash."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from local_stack.cluster.config import ConfigError, parse_config
from local_stack.cluster.kubernetes.resources import CONFIG_MAPS
from tests.adapters.kubernetes_standin.running_cluster import (
    CLUSTER_ARN,
    RunningCluster,
    configuration,
    running_cluster,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def two_clusters() -> dict[str, Any]:
    document = configuration()
    second = {
        **document["clusters"][0],
        "hyperpod_cluster_name": "research",
        "hyperpod_cluster_arn": CLUSTER_ARN.replace("abcdefghijkl", "zyxwvutsrqpo"),
        "eks_cluster_name": "research-eks",
        "instance_groups": [{"name": "small", "count": 1, "gpus_per_instance": 2}],
    }
    return {**document, "clusters": [document["clusters"][0], second]}


def test_clusters_of_one_server_share_nothing(tmp_path: Path) -> None:
    with running_cluster(tmp_path, clusters=two_clusters()["clusters"]) as running:
        first, second = running.control("/local/info")[1]["clusters"]
        assert (len(first["nodes"]), len(second["nodes"])) == (3, 1)
        assert len(second["nodes"][0]["gpu_uuids"]) == 2
        assert first["kubernetes_url"] != second["kubernetes_url"]
        sagemaker = running.sagemaker()
        listed = sagemaker.list_cluster_nodes(ClusterName="research")["ClusterNodeSummaries"]
        sagemaker.close()
        assert [node["InstanceId"] for node in listed] == [second["nodes"][0]["instance_id"]]
        with running.http(second["admin_token"]) as client:
            assert client.get("/api/v1/nodes").status_code == 401, "a token of one cluster opened the other"


@pytest.mark.parametrize(
    ("content_type", "body", "code"),
    [
        ("application/json", b"{", 400),
        ("application/json", b"[]", 400),
        ("application/json", b'{"kind": "Pod", "metadata": {"name": "a"}}', 400),
        ("application/json", b'{"apiVersion": "v2", "metadata": {"name": "a"}}', 400),
        ("application/json", b'{"metadata": {"name": "a", "resourceVersion": "1"}}', 400),
        ("application/json", b'{"metadata": {"name": "A_b"}}', 422),
        ("application/json", b'{"metadata": {}}', 422),
        ("application/json", b'{"metadata": {"name": "a"}, "data": {"a": 1}}', 422),
        ("application/yaml", b"metadata: {name: a}", 415),
    ],
)
def test_a_body_that_is_no_object_of_the_kind_is_refused(
    cluster: RunningCluster, content_type: str, body: bytes, code: int
) -> None:
    with cluster.http() as client:
        answer = client.post(
            "/api/v1/namespaces/default/configmaps", content=body, headers={"Content-Type": content_type}
        )
    assert (answer.status_code, answer.json()["code"]) == (code, code)


def test_a_body_without_end_is_refused_unread(cluster: RunningCluster) -> None:
    with cluster.http() as client:
        answer = client.post("/api/v1/namespaces/default/configmaps", content=iter([b"{}"]))
        assert answer.status_code == 413
        assert client.get("/api/v1/nodes").status_code == 200


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configuration()))
    state = tmp_path / "state"
    command = [sys.executable, "-m", "local_stack.cluster.server", "--state-dir", str(state), "--config", str(config)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            announced = json.loads(process.stdout.readline()) if process.stdout else {}
            with httpx2.Client(base_url=announced["url"], trust_env=False) as control:
                cluster = control.get("/local/info").json()["clusters"][0]
                fault = {"node_name": cluster["nodes"][0]["node_name"], "fault": {"kind": "bit_flip"}}
                assert control.post("/local/faults", json=fault).status_code == 200
            headers = {"Authorization": f"Bearer {cluster['admin_token']}"}
            trust = ssl.create_default_context(cadata=cluster["ca_pem"])
            with httpx2.Client(base_url=cluster["kubernetes_url"], headers=headers, verify=trust) as client:
                for index in range(20):
                    body = {"metadata": {"name": f"c{index}"}}
                    assert client.post("/api/v1/namespaces/default/configmaps", json=body).status_code == 201
        finally:
            process.send_signal(signal.SIGKILL)
    with running_cluster(state) as running:
        assert len(running.objects(CONFIG_MAPS)) == 20
        nodes = running.control("/local/info")[1]["clusters"][0]["nodes"]
        assert [node["instance_id"] for node in nodes] == [node["instance_id"] for node in cluster["nodes"]]
        assert nodes[0]["fault"] == {"kind": "bit_flip"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clusters": []}, "clusters: give at least one"),
        ({"seeds": 1}, "unknown setting seeds"),
        ({"provisioning_delay_seconds": -1}, "provisioning_delay_seconds must not be negative"),
        ({"clusters": [{}]}, "clusters\\[0\\]: give"),
        ({"clusters": {}}, "clusters must be a list"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({**configuration(), **change})
