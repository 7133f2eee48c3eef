"""The deployed template with its real handlers, from an alarm about a running job to a person's decision."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from lightkube import Client
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Namespace, Node, Pod

from local_stack import LocalStack
from local_stack.access_keys import access_key_of_role

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
CONTEXT = REPOSITORY / "demo" / "context.json"
ALARM = REPOSITORY / "trainer_sdk/src/truestep/contract/golden/alarm-v1.valid.conclusive.json"
NAMESPACE = "research"
JOB = create_namespaced_resource("sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs")
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    if not (REPOSITORY / "build" / "layer-host" / "python").is_dir():
        pytest.skip("the functions' dependencies are not installed: python -m infra.wheelhouse")
    directory = tmp_path_factory.mktemp("handlers")
    command = [sys.executable, "app.py", "--context", str(CONTEXT), "--output", str(directory / "cdk.out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with LocalStack(directory / "state", directory / "cdk.out") as running:
        yield running


Found = TypeVar("Found")


def until(look: Callable[[], Found], what: str) -> Found:
    """Wait until `look` returns something; the services have no other way than to ask."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:.0f} s for {what}"
        time.sleep(0.2)
    return found


def running_job(client: Client, name: str) -> list[Any]:
    """Start a job of three pods that only wait; returns its running pods."""
    container = {"name": "trainer", "image": "unused", "command": ["python", "-c", "import time; time.sleep(900)"]}
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
    replica = {"name": "worker", "replicas": 3, "template": template}
    spec = {"nprocPerNode": "1", "runPolicy": {}, "replicaSpecs": [replica]}
    client.create(JOB(metadata={"name": name, "namespace": NAMESPACE}, spec=spec))

    def running() -> list[Any]:
        pods = list(client.list(Pod, namespace=NAMESPACE, labels={"HPJob": name}))
        return pods if len(pods) == 3 and all(pod.status.phase == "Running" for pod in pods) else []

    return until(running, "the pods to run")


def alarm_about(stack: LocalStack, pods: list[Any], job_name: str) -> dict[str, Any]:
    """The golden alarm, told of these pods; the first is the suspect."""
    cluster = stack.cluster_info()["clusters"][0]
    gpus = {node["node_name"]: node["gpu_uuids"][0] for node in cluster["nodes"]}
    where = {"cluster_arn": cluster["hyperpod_cluster_arn"], "region": stack.region}
    alarm: dict[str, Any] = json.loads(ALARM.read_text())
    alarm["alarm_id"] = uuid.uuid4().hex
    root = "s3://truestep-demo-checkpoints/no-such-run"
    alarm["run"] |= where | {
        "namespace": NAMESPACE, "job_name": job_name, "world_size": 3, "restart_count": 0, "checkpoint_root": root,
    }  # fmt: skip
    for row, pod in zip((alarm["suspects"][0], *alarm["witnesses"]), pods, strict=True):
        row |= where | {
            "node_name": pod.spec.nodeName,
            "pod_name": pod.metadata.name,
            "pod_uid": pod.metadata.uid,
            "namespace": NAMESPACE,
            "job_name": job_name,
            "gpu_uuid": gpus[pod.spec.nodeName],
            "restart_count": 0,
        }
    return alarm


def test_an_alarm_quarantines_its_node_and_a_rejection_releases_it(stack: LocalStack) -> None:
    client = stack.kubernetes()
    client.create(Namespace.from_dict({"metadata": {"name": NAMESPACE}}))
    pods = running_job(client, "gpt")
    suspect = pods[0].spec.nodeName
    entry = {
        "Source": "truestep.training",
        "DetailType": "Training Corruption Alarm",
        "Detail": json.dumps(alarm_about(stack, pods, "gpt")),
        "EventBusName": stack.outputs["EventBusName"],
    }
    assert stack.client("events").put_events(Entries=[entry])["FailedEntryCount"] == 0

    link = until(lambda: approval_link(stack), "the approval link")
    cordoned = client.get(Node, suspect)
    assert cordoned.spec.unschedulable is True
    assert "truestep.ai/quarantine" in {taint.key for taint in cordoned.spec.taints}
    assert list(client.list(Pod, namespace=NAMESPACE, labels={"HPJob": "gpt"})) == []
    with urllib.request.urlopen(link, timeout=60) as page:  # noqa: S310 - loopback
        assert page.status == 200
        assert suspect in page.read().decode()

    decide(link, "reject")
    until(lambda: not client.get(Node, suspect).spec.unschedulable, "the node to be released")
    states = visited(stack)
    assert states.index("RequestApproval") < states.index("ReleaseNode")
    assert "ReplaceNode" not in states
    called = {(call["operation"], call["access_key"]) for call in stack.calls()}
    assert not [operation for operation, _ in called if operation == "BatchReplaceClusterNodes"]
    machine_role = stack.client("stepfunctions").describe_state_machine(
        stateMachineArn=stack.outputs["StateMachineArn"]
    )["roleArn"]
    assert ("Invoke", access_key_of_role(machine_role)) in called


def approval_link(stack: LocalStack) -> str:
    """The first link in what subscribers received; empty where there is none yet."""
    for message in stack.sns_messages():
        found = re.search(r"http://\S+/incidents/\S+signature=\S+", message["Message"])
        if found:
            return found[0]
    return ""


def decide(link: str, decision: str) -> None:
    """Send the page's form."""
    where, _, query = link.partition("?")
    form = urllib.parse.urlencode({"decision": decision, "comment": "a test"}).encode()
    with urllib.request.urlopen(f"{where}/decision?{query}", data=form, timeout=60) as answer:  # noqa: S310 - loopback
        assert answer.status == 200


def visited(stack: LocalStack) -> list[str]:
    """States of the only execution, in order."""
    (execution,) = stack.executions()
    history = stack.execution_history(execution["executionArn"])
    return [event["stateEnteredEventDetails"]["name"] for event in history if "stateEnteredEventDetails" in event]
