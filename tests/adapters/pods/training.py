"""Training jobs whose ranks are small Python programs, and what they report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from local_stack.cluster.kubernetes.resources import HYPERPOD_PYTORCH_JOBS, PODS
from tests.adapters.kubernetes_standin.running_cluster import RunningCluster

REPORT = """
import json, os, pathlib, signal, sys, time
report = pathlib.Path(os.environ["REPORTS"]); report.mkdir(parents=True, exist_ok=True)
entry = {**os.environ, "PID": os.getpid(), "ARGV": sys.argv}
target = report / f"{os.environ['POD_NAME']}-{os.environ['JOB_RESTART_COUNT']}.json"
target.with_suffix(".new").write_text(json.dumps(entry)); target.with_suffix(".new").rename(target)
print("rank", os.environ["RANK"], "reported", flush=True)
"""
HOLD = REPORT + "\nwhile True: time.sleep(60)\n"


class Job:
    """A HyperPodPyTorchJob on the running cluster."""

    def __init__(self, cluster: RunningCluster, name: str = "gpt") -> None:
        self.cluster = cluster
        self.name = name

    def create(self, program: str, *, replicas: int = 3, run_policy: dict[str, Any] | None = None, **pod: Any) -> Job:
        """Start the job; every pod runs the program."""
        fields = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName", "POD_UID": "metadata.uid"}
        container = {
            "name": "trainer",
            "image": "not-pulled",
            "command": ["python", "-c", program],
            "env": [
                {"name": "REPORTS", "value": "/fsx/reports"},
                *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
                *pod.pop("env", []),
            ],
            "volumeMounts": [{"name": "fsx", "mountPath": "/fsx"}, *pod.pop("mounts", [])],
            **pod.pop("container", {}),
        }
        spec = {
            "containers": [container],
            "terminationGracePeriodSeconds": 1,
            "volumes": [
                {"name": "fsx", "persistentVolumeClaim": {"claimName": "fsx"}},
                *pod.pop("volumes", []),
            ],
            **pod,
        }
        replica = {"name": "worker", "replicas": replicas, "template": {"spec": spec}}
        body = {
            "metadata": {"name": self.name},
            "spec": {"nprocPerNode": "1", "replicaSpecs": [replica], "runPolicy": run_policy or {}},
        }
        self.cluster.cluster.registry.create(HYPERPOD_PYTORCH_JOBS, "default", body)
        return self

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.cluster.objects(HYPERPOD_PYTORCH_JOBS)[self.name].get("status", {})
        return status

    @property
    def condition(self) -> str:
        """The condition that holds now."""
        return next((item["type"] for item in self.status.get("conditions", []) if item["status"] == "True"), "")

    def pods(self) -> dict[str, dict[str, Any]]:
        labelled = self.cluster.cluster.registry.select(PODS, "default", labels=f"HPJob={self.name}")[0]
        return {pod["metadata"]["name"]: pod for pod in labelled}

    def suspend(self, suspended: bool = True) -> None:
        with self.cluster.http() as client:
            answer = client.patch(
                f"/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs/{self.name}",
                headers={"Content-Type": "application/merge-patch+json"},
                json={"spec": {"runPolicy": {"suspend": suspended}}},
            )
            assert answer.is_success, answer.text

    def wait_for(self, condition: str) -> None:
        self.cluster.wait_until(lambda: self.condition == condition, f"{self.name} is {condition}")

    @property
    def volume(self) -> Path:
        return self.cluster.state_dir / "training-eks" / "volumes" / "fsx"

    def reports(self, start: int, count: int = 3) -> dict[str, dict[str, Any]]:
        """Pod name -> environment of the process, once every pod of that start has reported."""

        def all_there() -> Any:
            found = sorted((self.volume / "reports").glob(f"*-{start}.json"))
            return found if len(found) == count else None

        files = self.cluster.wait_until(all_there, f"{count} reports of start {start}")
        return {entry["POD_NAME"]: entry for entry in (json.loads(file.read_text()) for file in files)}

    def log(self, pod: str, **query: str) -> str:
        with self.cluster.http() as client:
            answer = client.get(f"/api/v1/namespaces/default/pods/{pod}/log", params=query)
            assert answer.is_success, answer.text
            return answer.text


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
