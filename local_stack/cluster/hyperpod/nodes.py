"""What the HyperPod control plane and its health agent write to Kubernetes nodes."""

from __future__ import annotations

import platform
from typing import Any

from local_stack.cluster.config import ClusterConfig
from local_stack.cluster.hyperpod.instances import Instance
from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.registry import Registry
from local_stack.cluster.kubernetes.resources import NODES
from local_stack.cluster.node_state import mark_node, set_ready
from local_stack.cluster.scheduler import GPU

PREFIX = "sagemaker.amazonaws.com"
NODE_HEALTH = f"{PREFIX}/node-health-status"
DEEP_HEALTH_CHECK = f"{PREFIX}/deep-health-check-status"
UNSCHEDULABLE_TAINT = {"key": NODE_HEALTH, "value": "Unschedulable", "effect": "NoSchedule"}


def _node_info(instance_id: str) -> dict[str, str]:
    """Every field that the API requires: typed clients refuse a node without one of them."""
    return {
        "architecture": platform.machine(),
        "bootID": instance_id,
        "containerRuntimeVersion": "process://local",
        "kernelVersion": platform.release(),
        "kubeProxyVersion": "",
        "kubeletVersion": "v1.33.0-truestep",
        "machineID": instance_id,
        "operatingSystem": "linux",
        "osImage": "local process",
        "systemUUID": instance_id,
    }


class HyperPodNodes:
    """The Kubernetes side of the instances of one cluster."""

    def __init__(self, registry: Registry, config: ClusterConfig) -> None:
        self._registry = registry
        self._config = config

    def join(self, instance: Instance) -> None:
        """Register the instance's node and post that it is ready. A node that is there already is left as it is."""
        capacity = {"cpu": "192", "memory": "2Ti", "pods": "110", GPU: str(len(instance.gpu_uuids))}
        node: dict[str, Any] = {
            "metadata": {
                "name": instance.node_name,
                "labels": {
                    "kubernetes.io/hostname": instance.node_name,
                    "kubernetes.io/os": "linux",
                    "node.kubernetes.io/instance-type": instance.instance_type,
                    f"{PREFIX}/cluster-name": self._config.hyperpod_cluster_name,
                    f"{PREFIX}/compute-type": "hyperpod",
                    NODE_HEALTH: "Schedulable",
                },
            },
            "spec": {"providerID": f"aws:///local/{self._config.hyperpod_cluster_name}/{instance.instance_id}"},
            "status": {
                "capacity": capacity,
                "allocatable": dict(capacity),
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "nodeInfo": _node_info(instance.instance_id),
            },
        }
        if self._registry.find(NODES, "", instance.node_name) is None:
            self._registry.create(NODES, "", node)
        set_ready(self._registry, instance.node_name, ready=True, reason="KubeletReady")

    def leave(self, instance: Instance) -> None:
        """Delete the node of an instance that was terminated."""
        try:
            self._registry.delete(NODES, "", instance.node_name)
        except ApiError as error:
            if error.code != 404:
                raise

    def stop(self, instance: Instance) -> None:
        """The node stops answering: a reboot began."""
        set_ready(self._registry, instance.node_name, ready=False, reason="KubeletStopped")

    def lose_power(self, instance: Instance) -> None:
        """The node is silent from one moment to the next."""
        set_ready(self._registry, instance.node_name, ready=None, reason="NodeStatusUnknown")

    def check_started(self, instance: Instance) -> None:
        """Labels and taint of a deep health check that runs."""
        labels = {DEEP_HEALTH_CHECK: "InProgress", NODE_HEALTH: "Unschedulable"}
        mark_node(self._registry, instance.node_name, labels=labels, add_taints=[UNSCHEDULABLE_TAINT])

    def check_passed(self, instance: Instance) -> None:
        """The node may be used again, as far as the health agent is concerned: it takes off its own taint only."""
        labels = {DEEP_HEALTH_CHECK: "Passed", NODE_HEALTH: "Schedulable"}
        mark_node(self._registry, instance.node_name, labels=labels, remove_taints=[UNSCHEDULABLE_TAINT])

    def check_failed(self, instance: Instance) -> None:
        """The node stays unusable until it is replaced."""
        labels = {DEEP_HEALTH_CHECK: "Failed", NODE_HEALTH: "UnschedulablePendingReplacement"}
        mark_node(self._registry, instance.node_name, labels=labels, add_taints=[UNSCHEDULABLE_TAINT])
