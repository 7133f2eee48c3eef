"""One cluster put together: API server, controllers and HyperPod instances over one store."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from local_stack.cluster.auto_resume import AutoResume
from local_stack.cluster.config import ClusterConfig, Config
from local_stack.cluster.controller import Controller
from local_stack.cluster.http_server import LoopbackServer
from local_stack.cluster.hyperpod.model import HyperPodCluster
from local_stack.cluster.hyperpod.nodes import HyperPodNodes
from local_stack.cluster.job_lifetimes import JobLifetimes
from local_stack.cluster.kubelet import Kubelet, fault_environment
from local_stack.cluster.kubernetes.api import KubernetesApi
from local_stack.cluster.kubernetes.auth import Authenticator
from local_stack.cluster.kubernetes.certificates import server_context
from local_stack.cluster.kubernetes.rbac import Authorizer
from local_stack.cluster.kubernetes.registry import Registry
from local_stack.cluster.kubernetes.request_record import RequestRecord
from local_stack.cluster.kubernetes.resources import NAMESPACES
from local_stack.cluster.kubernetes.store import ObjectStore
from local_stack.cluster.kueue import Kueue
from local_stack.cluster.node_state import NodeLifecycle
from local_stack.cluster.scheduler import Scheduler
from local_stack.cluster.training_operator import TrainingOperator

_NAMESPACES = ("default", "kube-system", "aws-hyperpod")


def _admin_token(path: Path) -> str:
    """The administrator's token, made once; readable by the owner only."""
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return path.read_text()


class LocalCluster:
    """An EKS cluster and its HyperPod cluster, running in this process. `start`, then `stop`."""

    def __init__(self, config: ClusterConfig, settings: Config, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self.config = config
        self._state_dir = state_dir
        self.admin_token = _admin_token(state_dir / "admin-token")
        context, self.ca_pem = server_context(state_dir / "pki")
        self.store = ObjectStore(state_dir / "kubernetes.sqlite3", history_limit=settings.watch_history_limit)
        self.registry = Registry(self.store)
        self.authenticator = Authenticator(config.eks_cluster_name, self.admin_token)
        authorizer = Authorizer(Path(settings.rbac_dir) if settings.rbac_dir else None, config.training_namespaces)
        self.kubelet = Kubelet(self.registry, state_dir, self._instance_environment)
        self.hyperpod = HyperPodCluster(
            config, settings, HyperPodNodes(self.registry, config), state_dir / "instances.json"
        )
        self._controllers: list[Controller] = [
            NodeLifecycle(self.registry),
            Scheduler(self.registry),
            TrainingOperator(self.registry, settings.seed),
            JobLifetimes(self.registry),
            Kueue(self.registry),
            AutoResume(self.registry),
            self.kubelet,
        ]
        self._requests = RequestRecord(state_dir / "kubernetes-requests.jsonl")
        api = KubernetesApi(self.registry, self.authenticator, authorizer, self.kubelet, self._requests)
        self._server = LoopbackServer(api.handle, tls=context)

    @property
    def url(self) -> str:
        """Base URL of the Kubernetes API."""
        return self._server.url

    def start(self) -> None:
        """Bring up the nodes, the controllers and the API; write the kubeconfig."""
        for name in _NAMESPACES:
            if self.registry.find(NAMESPACES, "", name) is None:
                self.registry.create(NAMESPACES, "", {"metadata": {"name": name}})
        self.hyperpod.start()
        for controller in self._controllers:
            controller.start()
        self._server.start()
        self._write_kubeconfig(self._state_dir / "kubeconfig")

    def stop(self) -> None:
        """Stop accepting, end the pods' processes, release the watches."""
        self._server.stop()
        self.hyperpod.close()
        self.kubelet.shutdown()
        self.store.close()
        self._requests.close()
        for controller in self._controllers:
            controller.join(timeout_seconds=2.0)

    def describe(self) -> dict[str, Any]:
        """What `/local/info` says of this cluster."""
        nodes = [
            {
                "node_name": instance.node_name,
                "instance_id": instance.instance_id,
                "node_logical_id": instance.node_logical_id,
                "instance_group": instance.instance_group,
                "gpu_uuids": list(instance.gpu_uuids),
                "status": instance.status,
                "fault": instance.fault,
            }
            for instance in self.hyperpod.instances()
        ]
        return {
            "hyperpod_cluster_name": self.config.hyperpod_cluster_name,
            "hyperpod_cluster_arn": self.config.hyperpod_cluster_arn,
            "eks_cluster_name": self.config.eks_cluster_name,
            "kubernetes_url": self.url,
            "ca_pem": self.ca_pem,
            "admin_token": self.admin_token,
            "kubeconfig": str(self._state_dir / "kubeconfig"),
            "volumes_dir": str(self._state_dir / "volumes"),
            "nodes": nodes,
        }

    def _instance_environment(self, node_name: str) -> dict[str, str] | None:
        instance = self.hyperpod.find(node_name=node_name)
        return None if instance is None else fault_environment(instance.gpu_uuids[0], instance.fault)

    def _write_kubeconfig(self, path: Path) -> None:
        name = self.config.eks_cluster_name
        cluster = {"server": self.url, "certificate-authority": str(self._state_dir.resolve() / "pki" / "ca.crt")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": "local-administrator", "user": {"token": self.admin_token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": "local-administrator"}}],
            "current-context": name,
        }
        path.touch(mode=0o600)
        # JSON is YAML: nothing needs quoting.
        path.write_text(json.dumps(document, indent=1))
