"""The server answers kubectl, where that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.kubernetes_standin.running_cluster import RunningCluster

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture
def kubectl(cluster: RunningCluster, tmp_path: Path) -> Any:
    def run(*arguments: str, stdin: str | None = None, code: int = 0) -> str:
        command = ["kubectl", "--kubeconfig", str(cluster.kubeconfig), "--cache-dir", str(tmp_path), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def test_nodes_are_listed_by_short_name(kubectl: Any) -> None:
    assert kubectl("get", "no", "-o", "name").count("node/hyperpod-i-") == 3


def test_a_table_shows_what_matters_of_a_node(kubectl: Any) -> None:
    header, *rows = kubectl("get", "nodes").splitlines()
    assert header.split() == ["NAME", "STATUS", "TAINTS", "AGE"]
    assert len(rows) == 3


def test_apply_creates_and_then_changes(kubectl: Any) -> None:
    def config_map(value: str) -> str:
        return json.dumps(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "applied"}, "data": {"a": value}}
        )

    assert "created" in kubectl("apply", "-f", "-", stdin=config_map("1"))
    assert "configured" in kubectl("apply", "-f", "-", stdin=config_map("2"))
    assert kubectl("get", "configmap", "applied", "-o", "jsonpath={.data.a}") == "2"


def test_a_node_is_cordoned_tainted_and_uncordoned(kubectl: Any) -> None:
    name = kubectl("get", "nodes", "-o", "name").splitlines()[0].removeprefix("node/")
    kubectl("cordon", name)
    kubectl("taint", "nodes", name, "example.com/reason=test:NoSchedule")
    spec = json.loads(kubectl("get", "node", name, "-o", "json"))["spec"]
    assert spec["unschedulable"] is True
    assert {"key": "example.com/reason", "value": "test", "effect": "NoSchedule"} in spec["taints"]
    kubectl("taint", "nodes", name, "example.com/reason=test:NoSchedule-")
    kubectl("uncordon", name)
    spec = json.loads(kubectl("get", "node", name, "-o", "json"))["spec"]
    assert not spec.get("unschedulable")
    assert not spec.get("taints")


def test_a_pod_is_created_read_and_deleted(kubectl: Any) -> None:
    container = {"name": "c", "image": "none", "command": ["python", "-c", "print('from the pod')"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hello"}, "spec": {"containers": [container]}}
    kubectl("create", "-f", "-", stdin=json.dumps(pod))
    kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/hello", "--timeout=20s")
    assert kubectl("logs", "hello") == "from the pod\n"
    kubectl("delete", "pod", "hello", "--timeout=20s")
    assert "NotFound" in kubectl("get", "pod", "hello", code=1)


def test_drain_empties_a_node(kubectl: Any) -> None:
    container = {"name": "c", "image": "none", "command": ["python", "-c", "import time; time.sleep(60)"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "evicted"}, "spec": {"containers": [container]}}
    kubectl("create", "-f", "-", stdin=json.dumps(pod))
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/evicted", "--timeout=20s")
    node = kubectl("get", "pod", "evicted", "-o", "jsonpath={.spec.nodeName}")
    kubectl("drain", node, "--force", "--grace-period=1", "--timeout=20s")
    assert "NotFound" in kubectl("get", "pod", "evicted", code=1)
    assert "Ready,SchedulingDisabled" in kubectl("get", "node", node)
    kubectl("uncordon", node)


def test_a_training_job_is_suspended_by_a_merge_patch(kubectl: Any) -> None:
    template = {"spec": {"containers": [{"name": "t", "command": ["python", "-c", "import time; time.sleep(60)"]}]}}
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "small"},
        "spec": {"replicaSpecs": [{"name": "w", "replicas": 1, "template": template}]},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(job))
    kubectl("wait", "--for=condition=Running", "hyperpodpytorchjob/small", "--timeout=20s")
    kubectl("patch", "hyperpodpytorchjob", "small", "--type=merge", "-p", '{"spec":{"runPolicy":{"suspend":true}}}')
    kubectl("wait", "--for=condition=Suspended", "hyperpodpytorchjob/small", "--timeout=20s")
    assert kubectl("get", "pods", "-l", "HPJob=small", "-o", "name") == ""
    kubectl("delete", "hyperpodpytorchjob", "small", "--timeout=20s")
