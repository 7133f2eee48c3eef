"""A deployment that serves several clusters reaches each at its own API server."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from lightkube import Client, KubeConfig
from lightkube.resources.core_v1 import Node

from local_stack.cluster_settings import ClusterSettings
from local_stack.edge.cluster import describe_eks_cluster
from local_stack.edge.forwarding import Upstream
from local_stack.process import start_server, stop

CLUSTERS = {
    f"arn:aws:sagemaker:us-west-2:123456789012:cluster/{name}0000000": {
        "hyperpod_cluster_name": name,
        "eks_cluster_name": f"{name}-eks",
        "training_namespaces": [name],
    }
    for name in ("first", "other")
}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    directory = tmp_path_factory.mktemp("clusters")
    config = directory / "config.json"
    config.write_text(json.dumps(ClusterSettings(node_count=2).document(CLUSTERS)))
    argv = [sys.executable, "-m", "local_stack.cluster.server", "--state-dir", str(directory), "--config", str(config)]
    server = start_server("cluster", argv, log_path=directory / "cluster.log", cwd=Path.cwd()).wait_ready()
    yield Upstream("cluster", int(server.announcement["port"]))
    stop([server.process])


def nodes_behind(upstream: Upstream, name: str, directory: Path) -> set[str]:
    """Nodes of the API server that DescribeCluster names."""
    answer = asyncio.run(describe_eks_cluster(upstream, name, "us-west-2", "123456789012", {}))
    assert answer.status == 200
    cluster = json.loads(answer.body)["cluster"]
    info = json.loads(asyncio.run(upstream.send("GET", "/local/info", [("Host", "127.0.0.1")], b"")).body)
    (token,) = [one["admin_token"] for one in info["clusters"] if one["eks_cluster_name"] == name]
    authority = directory / f"{name}.pem"
    authority.write_bytes(base64.b64decode(cluster["certificateAuthority"]["data"]))
    config = KubeConfig.from_dict(
        {
            "clusters": [
                {"name": name, "cluster": {"server": cluster["endpoint"], "certificate-authority": str(authority)}}
            ],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": "admin"}}],
            "current-context": name,
        }
    )
    client = Client(config.get(), timeout=httpx2.Timeout(10), trust_env=False)
    found = {node.metadata.name for node in client.list(Node)}
    client.close()
    return found


def test_each_cluster_is_described_with_its_own_server_and_authority(upstream: Upstream, tmp_path: Path) -> None:
    first, other = (nodes_behind(upstream, name, tmp_path) for name in ("first-eks", "other-eks"))
    assert len(first) == len(other) == 2
    assert first.isdisjoint(other)


def test_a_cluster_that_there_is_not_is_not_found(upstream: Upstream) -> None:
    answer = asyncio.run(describe_eks_cluster(upstream, "third-eks", "us-west-2", "123456789012", {}))
    assert answer.status == 404
    assert b"third-eks" in answer.body
