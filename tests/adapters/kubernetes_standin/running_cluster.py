"""A cluster server in the test's process, and ways to talk to it."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx2
from lightkube import Client, KubeConfig
from lightkube.generic_resource import create_namespaced_resource

from local_stack.cluster.cluster import LocalCluster
from local_stack.cluster.config import parse_config
from local_stack.cluster.kubernetes.resources import Resource
from local_stack.cluster.server import ClusterServer

CLUSTER_ARN = "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghijkl"
EKS_NAME = "training-eks"
TIMEOUT_SECONDS = 20.0
SESSION = boto3.session.Session()
"""Shared, so that the service's large model is read once."""
TRAINING_JOB = create_namespaced_resource("sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs")


def configuration(**settings: Any) -> dict[str, Any]:
    """The JSON of a configuration: one cluster of three nodes, and no time lost; cluster settings under `cluster`."""
    cluster = {
        "hyperpod_cluster_name": "training",
        "hyperpod_cluster_arn": CLUSTER_ARN,
        "eks_cluster_name": EKS_NAME,
        "instance_groups": [{"name": "workers", "count": 3}],
        **settings.pop("cluster", {}),
    }
    delays = {"provisioning_delay_seconds": 0.05, "health_check_seconds": 0.05, "reboot_seconds": 0.05}
    return {"clusters": [cluster], **delays, **settings}


class RunningCluster:
    """A started server with one cluster."""

    def __init__(self, server: ClusterServer, state_dir: Path) -> None:
        self.server = server
        self.state_dir = state_dir

    @property
    def cluster(self) -> LocalCluster:
        return self.server.clusters[0]

    @property
    def kubeconfig(self) -> Path:
        return self.state_dir / EKS_NAME / "kubeconfig"

    @contextmanager
    def lightkube(self, namespace: str = "default") -> Iterator[Client]:
        with Client(KubeConfig.from_file(self.kubeconfig), namespace=namespace, trust_env=False) as client:
            yield client

    def http(self, token: str | None = None, **options: Any) -> httpx2.Client:
        token = self.cluster.admin_token if token is None else token
        trust = ssl.create_default_context(cadata=self.cluster.ca_pem)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx2.Client(base_url=self.cluster.url, headers=headers, verify=trust, trust_env=False, **options)

    def sagemaker(self) -> Any:
        return SESSION.client(
            "sagemaker",
            region_name="us-west-2",
            endpoint_url=self.server.url,
            aws_access_key_id="LOCALTEST",
            aws_secret_access_key="secret",
        )

    def control(self, path: str, body: Any = None) -> tuple[int, Any]:
        with httpx2.Client(base_url=self.server.url, trust_env=False) as client:
            answer = client.get(path) if body is None else client.post(path, json=body)
            return answer.status_code, answer.json()

    def objects(self, resource: Resource, namespace: str = "") -> dict[str, dict[str, Any]]:
        return {body["metadata"]["name"]: body for body in self.cluster.registry.select(resource, namespace)[0]}

    def wait_until(self, condition: Callable[[], Any], what: str = "the condition") -> Any:
        """Wait until the condition holds, and return its value: woken by every change of the store, or by the time
        for what the store does not show (files)."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        store = self.cluster.store
        while True:
            seen = store.version
            if value := condition():
                return value
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"{what} did not hold within {TIMEOUT_SECONDS:g} s"
            store.wait_beyond(seen, min(remaining, 0.1))


@contextmanager
def running_cluster(state_dir: Path, **settings: Any) -> Iterator[RunningCluster]:
    """A server over `state_dir`; what is in there from an earlier one is taken up."""
    server = ClusterServer(parse_config(configuration(**settings)), state_dir)
    server.start()
    try:
        yield RunningCluster(server, state_dir)
    finally:
        server.stop()
