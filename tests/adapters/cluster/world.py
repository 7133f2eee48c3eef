"""The world of these tests: the cluster stand-in in a process of its own, and EKS DescribeCluster over HTTP."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Namespace
from lightkube.types import PatchType

from lambdas.adapters.kubernetes import ConfigMap, Node, Pod
from lambdas.domain.cluster_access import Group
from local_stack.process import start_server, stop

ROOT = Path(__file__).resolve().parents[3]
HYPERPOD_ARN = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"
HYPERPOD_NAME, EKS_NAME, GROUP = "training", "training-eks", "workers"
NAMESPACE = "team-a"
ACCESS_KEY = "LOCALRECOVERY"
HyperPodPyTorchJob = create_namespaced_resource(
    "sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs"
)
T = TypeVar("T")


def wait_until(look: Callable[[], T | None], what: str, seconds: float = 20.0) -> T:
    """The first truthy answer. Fails the test with `what` when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@dataclass
class World:
    """One running cluster: its control URL, and an administrator's client."""

    control_url: str
    admin: Client
    description: dict[str, Any] = field(default_factory=dict)

    def control(self, path: str, body: Any | None = None) -> Any:
        """Call the control listener; GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.control_url}{path}", data=data)  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return json.load(answer)

    def nodes(self) -> list[dict[str, Any]]:
        """What the stand-in knows of its instances."""
        found: list[dict[str, Any]] = self.control("/local/info")["clusters"][0]["nodes"]
        return found

    def node(self, name: str) -> dict[str, Any]:
        return dict(self.admin.get(Node, name))

    def start_job(
        self,
        name: str,
        replicas: int = 2,
        *,
        stubborn: bool = False,
        labels: dict[str, str] | None = None,
        config_map: str = "",
    ) -> list[dict[str, Any]]:
        """A job whose pods print a line and sleep; returns its pods once all run and have printed.

        config_map: whose keys are variables of the pods.
        """
        ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
        container = {
            "name": "training",
            "image": "training",
            "command": ["python", "-c", f"{ignore}import time; print('step 7 done', flush=True); time.sleep(600)"],
            "envFrom": [{"configMapRef": {"name": config_map}}] if config_map else [],
        }
        template = {"spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 3}}
        job = {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels or {}},
            "spec": {
                "nprocPerNode": "1",
                "replicaSpecs": [{"name": "worker", "replicas": replicas, "template": template}],
                "runPolicy": {"suspend": False},
            },
        }
        self.admin.create(HyperPodPyTorchJob(job))
        pods = wait_until(lambda: self.running_pods(name, replicas), f"{replicas} running pods of {name}")
        for pod in pods:
            wait_until(partial(self.log, pod["metadata"]["name"]), "the pod's first line")
        return pods

    def log(self, pod: str) -> str:
        return "".join(self.admin.log(pod, namespace=NAMESPACE))

    def pods(self, job: str) -> list[dict[str, Any]]:
        return [dict(pod) for pod in self.admin.list(Pod, namespace=NAMESPACE, labels={"HPJob": job})]

    def running_pods(self, job: str, count: int) -> list[dict[str, Any]] | None:
        pods = [pod for pod in self.pods(job) if pod["status"].get("phase") == "Running"]
        return pods if len(pods) == count else None

    def delete_job(self, name: str) -> None:
        try:
            self.admin.delete(HyperPodPyTorchJob, name, namespace=NAMESPACE)
        except ApiError as error:
            if error.response.status_code != 404:
                raise
        wait_until(lambda: not self.pods(name), f"pods of {name} gone")

    def run_pod_on(self, node_name: str, name: str) -> None:
        """A pod of no job, bound to the node, that sleeps."""
        container = {"name": "c", "image": "c", "command": ["python", "-c", "import time; time.sleep(600)"]}
        spec = {"nodeName": node_name, "containers": [container], "restartPolicy": "Never"}
        self.admin.create(Pod({"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}))

    def directive(self, job: str) -> dict[str, Any]:
        """The resume directive that the job's pods would mount."""
        found = self.admin.get(ConfigMap, f"truestep-resume-{job}", namespace=NAMESPACE)
        directive: dict[str, Any] = json.loads(found["data"]["resume.json"])
        return directive

    def everything(self) -> dict[str, Any]:
        """Versions of all objects that a recovery could change, and the instances."""
        kinds: list[tuple[Any, dict[str, str]]] = [(Node, {})]
        kinds += [(kind, {"namespace": NAMESPACE}) for kind in (Pod, ConfigMap, HyperPodPyTorchJob)]
        versions = {
            f"{found['kind']}/{found['metadata']['name']}": found["metadata"]["resourceVersion"]
            for kind, where in kinds
            for found in self.admin.list(kind, **where)
        }
        return {"versions": versions, "instances": self.nodes()}

    def edit_node(self, name: str, patch: Any) -> None:
        self.admin.patch(Node, name, patch, patch_type=PatchType.STRATEGIC)


@contextmanager
def running_world(state_dir: Path, *, manifests: Path = ROOT / "infra" / "kubernetes") -> Iterator[World]:
    """Start the cluster server with the RBAC manifests, and register the recovery's access key, in all groups."""
    config = {
        "clusters": [
            {
                "hyperpod_cluster_name": HYPERPOD_NAME,
                "hyperpod_cluster_arn": HYPERPOD_ARN,
                "eks_cluster_name": EKS_NAME,
                "instance_groups": [{"name": GROUP, "count": 5}],
                "training_namespaces": [NAMESPACE],
            }
        ],
        "provisioning_delay_seconds": 0.3,
        "health_check_seconds": 0.5,
        "rbac_dir": str(manifests),
    }
    state_dir.mkdir(parents=True, exist_ok=True)
    config_file = state_dir / "config.json"
    config_file.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "local_stack.cluster.server", "--state-dir", str(state_dir / "cluster")]
    server = start_server(
        "cluster", [*argv, "--config", str(config_file)], log_path=state_dir / "cluster.log", cwd=ROOT
    ).wait_ready()
    try:
        url = str(server.announcement["url"])
        with urllib.request.urlopen(f"{url}/local/info", timeout=10) as answer:  # noqa: S310 - loopback
            description = json.load(answer)["clusters"][0]
        config_path = Path(description["kubeconfig"])
        admin = Client(KubeConfig.from_file(config_path).get(), timeout=httpx2.Timeout(10), trust_env=False)
        world = World(control_url=url, admin=admin, description=description)
        role = {"role_arn": "arn:aws:iam::123456789012:role/recovery", "groups": list(Group)}
        world.control("/local/principals", {ACCESS_KEY: role})
        admin.create(Namespace.from_dict({"metadata": {"name": NAMESPACE}}))
        yield world
        admin.close()
    finally:
        stop([server.process])


@contextmanager
def serving_eks(description: dict[str, Any]) -> Iterator[str]:
    """EKS DescribeCluster for the one cluster, as the edge of the local stack answers it."""
    authority = base64.b64encode(description["ca_pem"].encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == f"/clusters/{EKS_NAME}"
            body: dict[str, Any] = {"message": f"No cluster found for name: {self.path.rsplit('/', 1)[1]}."}
            if found:
                body = {
                    "cluster": {
                        "name": EKS_NAME,
                        "status": "ACTIVE",
                        "endpoint": description["kubernetes_url"],
                        "certificateAuthority": {"data": authority},
                    }
                }
            content = json.dumps(body).encode()
            self.send_response(200 if found else 404)
            if not found:
                self.send_header("x-amzn-errortype", "ResourceNotFoundException")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"
