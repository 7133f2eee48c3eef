"""Which Job of the cluster is the recovery's own: one that would run exactly what the recovery would have it run."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lambdas.domain.cluster_adoption import same_job
from lambdas.domain.cluster_confirmation import Place
from tests.unit.cluster_side.test_confirmation_job import FSX, PLACE, S3, job

QUEUE = {"kueue.x-k8s.io/queue-name": "gpu"}


def as_stored(manifest: dict[str, Any]) -> dict[str, Any]:
    """The Job as an API server gives it back: defaults filled in, what is empty left out."""
    stored = copy.deepcopy(manifest)
    stored["metadata"] |= {"uid": "uid-j", "generation": 1}
    stored["spec"] |= {"parallelism": 1, "completions": 1, "completionMode": "NonIndexed", "suspend": False}
    stored["spec"]["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": "uid-j"}}
    template = stored["spec"]["template"]
    template["metadata"]["labels"] = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": "j"}
    pod = template["spec"]
    pod |= {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler", "serviceAccount": "trainer"}
    (container,) = pod["containers"]
    for variable in container["env"]:
        if "fieldRef" in variable.get("valueFrom", {}):
            variable["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    if not pod["volumes"]:
        del pod["volumes"], container["volumeMounts"]
    if not container["securityContext"]["capabilities"]["drop"]:
        container["securityContext"]["capabilities"] = {}
    return stored


@pytest.mark.parametrize("bundle", [S3, FSX])
def test_the_job_that_the_recovery_makes_is_known_again(bundle: str) -> None:
    assert same_job(as_stored(job(PLACE, bundle)), job(PLACE, bundle))
    assert not same_job(as_stored(job(PLACE, bundle)), job(Place(node_name="hyperpod-i-2", gpus=8), bundle))


@pytest.mark.parametrize(
    ("where", "change"),
    [
        (("metadata",), {"labels": {}}),
        (("metadata",), {"annotations": {"truestep.ai/alarm": "b"}}),
        (("spec",), {"parallelism": 2}),
        (("spec",), {"manualSelector": True}),
        (("spec", "template", "spec"), {"initContainers": [{"name": "first"}]}),
        (("spec", "template", "spec"), {"hostPID": True}),
        (("spec", "template", "spec"), {"affinity": {}}),
        (("spec", "template", "spec"), {"containers": []}),
        (("spec", "template", "spec", "containers", 0), {"image": "attacker/any"}),
        (("spec", "template", "spec", "containers", 0), {"command": ["python3", "-c", "print()"]}),
        (("spec", "template", "spec", "containers", 0), {"args": ["--gpus", "0"]}),
        (("spec", "template", "spec", "containers", 0), {"env": [{"name": "PYTHONPATH", "value": "/attacker"}]}),
        (("spec", "template", "spec", "containers", 0), {"envFrom": [{"configMapRef": {"name": "theirs"}}]}),
        (("spec", "template", "spec", "containers", 0), {"lifecycle": {"postStart": {}}}),
    ],
)
def test_a_ready_made_job_with_our_name_and_label_that_would_run_something_else_is_not(
    where: tuple[Any, ...], change: dict[str, Any]
) -> None:
    found = as_stored(job(PLACE))
    part: Any = found
    for key in where:
        part = part[key]
    part.update(change)
    assert not same_job(found, job(PLACE))


def test_one_that_kueue_has_admitted_is_known_again_and_one_without_a_queue_has_no_flavor() -> None:
    def admitted(queue: dict[str, str]) -> dict[str, Any]:
        found = as_stored(job(PLACE, queue=queue))
        pod = found["spec"]["template"]["spec"]
        pod["nodeSelector"] = {"capacity": "reserved"}
        pod["tolerations"] = [*pod["tolerations"], {"key": "reserved", "operator": "Exists"}]
        return found

    assert same_job(admitted(QUEUE), job(PLACE, queue=QUEUE))
    assert not same_job(admitted({}), job(PLACE))
    changed = admitted(QUEUE)
    del changed["spec"]["template"]["spec"]["tolerations"][0]
    assert not same_job(changed, job(PLACE, queue=QUEUE)), "only what comes after ours is the flavor's"
