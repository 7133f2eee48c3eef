"""The confirmation's Job: made of the training's own pod, and of no more of it than it needs; and how far it is."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from typing import Any

import pytest

from lambdas.domain.cluster_adoption import pods_of
from lambdas.domain.cluster_confirmation import (
    Place,
    comparison,
    job_manifest,
    job_name,
    place_of,
    progress,
    without_pod,
)
from lambdas.domain.cluster_workload import workload_of
from lambdas.domain.policy import Policy
from lambdas.domain.records import ConfirmedNode, Workload
from truestep.contract import DeviceReport, NodeReport, report_bytes

S3, FSX = "s3://bucket/run/bundles/a", "file:///fsx/run/bundles/a"
POD: dict[str, Any] = {
    "metadata": {"name": "job-0", "namespace": "team-a"},
    "spec": {
        "hostNetwork": True,
        "priorityClassName": "high",
        "serviceAccountName": "trainer",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"fsGroup": 1000},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"operator": "Exists"}],
        "volumes": [
            {"name": "fsx", "persistentVolumeClaim": {"claimName": "fsx"}},
            {"name": "code", "configMap": {"name": "code"}},
            {"name": "keys", "secret": {"secretName": "keys"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "nvme", "hostPath": {"path": "/opt/dlami/nvme"}},
        ],
        "containers": [
            {"name": "sidecar", "image": "sidecar"},
            {
                "name": "training",
                "image": "registry/train:1",
                "imagePullPolicy": "Always",
                "workingDir": "/code/app",
                "command": ["torchrun", "train.py"],
                "securityContext": {"privileged": True, "runAsUser": 1000, "capabilities": {"add": ["IPC_LOCK"]}},
                "resources": {
                    "limits": {"nvidia.com/gpu": 4, "vpc.amazonaws.com/efa": 32, "memory": "1Ti"},
                    "requests": {"cpu": "90"},
                },
                "envFrom": [{"secretRef": {"name": "everything"}}],
                "env": [
                    {"name": "HF_TOKEN", "value": "hf_secret"},
                    {"name": "AWS_SECRET_ACCESS_KEY", "value": "typed in"},
                    {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "aws", "key": "id"}}},
                    {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}},
                    {"name": "AWS_REGION", "value": "us-west-2"},
                    {"name": "PYTHONPATH", "value": "/fsx/lib:/code"},
                    {"name": "CUBLAS_WORKSPACE_CONFIG", "value": ":4096:8"},
                    {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
                    {"name": "RANK", "value": "3"},
                ],
                "volumeMounts": [
                    {"name": "fsx", "mountPath": "/fsx"},
                    {"name": "code", "mountPath": "/code"},
                    {"name": "keys", "mountPath": "/keys"},
                    {"name": "shm", "mountPath": "/shm"},
                    {"name": "nvme", "mountPath": "/local"},
                ],
            },
        ],
    },
}


def workload(bundle: str = S3, root: str = "s3://bucket/run") -> Workload:
    return workload_of(POD, bundle_uri=bundle, checkpoint_root=root)


def job(place: Place, bundle: str = S3, queue: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    return job_manifest(
        place,
        dataclasses.replace(workload(bundle), queue=queue or {}),
        namespace="team-a",
        incident_id="inc-0123456789abcdef",
        alarm_id="a",
        bundle_uri=bundle,
        policy=Policy(),
        **options,
    )


def spec(place: Place, bundle: str = S3) -> dict[str, Any]:
    manifest = job(place, bundle)
    assert manifest["spec"]["backoffLimit"] == 0
    assert manifest["spec"]["activeDeadlineSeconds"] == 1800
    pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return pod


PLACE = Place(node_name="hyperpod-i-1", gpus=8, instance_type="ml.p5.48xlarge")


def test_it_runs_as_the_training_does_on_all_gpus_of_the_node() -> None:
    pod = spec(PLACE)
    (container,) = pod["containers"]
    assert (container["image"], pod["serviceAccountName"], pod["runtimeClassName"]) == (
        "registry/train:1",
        "trainer",
        "nvidia",
    )
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert container["resources"] == {"limits": {"memory": "1Ti", "nvidia.com/gpu": "8"}, "requests": {"cpu": "90"}}
    command = container["command"]
    assert command[:4] == ["python3", "-m", "truestep.bundle.on_node", S3]
    assert command[command.index("--gpus") + 1] == "8"
    limits = {name: float(command[command.index(name) + 1]) for name in ("--seconds", "--limit", "--wait")}
    assert limits["--wait"] == 120
    late = job(PLACE, late=True)["spec"]["template"]["spec"]["containers"][0]["command"]
    assert late[late.index("--wait") + 1] == "30", "who was to finish it has been stopped"
    assert limits["--seconds"] < limits["--limit"] < 1800, "it reports before the Job's deadline deletes its pod"


def test_no_word_of_its_command_is_expanded_from_its_variables() -> None:
    """Kubernetes: "Variable references $(VAR_NAME) are expanded using the container's environment"."""
    pod = spec(PLACE, "s3://elsewhere/$(AWS_SECRET_ACCESS_KEY)/$$(PATH)")
    (container,) = pod["containers"]
    assert "AWS_ACCESS_KEY_ID" in [one["name"] for one in container["env"]], "the keys open the bundle's bucket"
    assert container["command"][3] == "s3://elsewhere/$$(AWS_SECRET_ACCESS_KEY)/$$$$(PATH)"


def test_it_is_neither_privileged_nor_on_the_hosts_network_and_never_pushes_others_away() -> None:
    text = json.dumps(spec(PLACE))
    for absent in ("hostNetwork", "privileged", "IPC_LOCK", "efa", "priorityClassName"):
        assert absent not in text
    assert spec(PLACE)["containers"][0]["securityContext"]["runAsUser"] == 1000


def test_secrets_stay_behind_but_for_the_references_that_open_the_bundles_bucket() -> None:
    environment = {each["name"]: each for each in spec(PLACE)["containers"][0]["env"]}
    assert set(environment) == {
        "AWS_ACCESS_KEY_ID", "AWS_REGION", "PYTHONPATH", "CUBLAS_WORKSPACE_CONFIG", "NODE_NAME",
    }  # fmt: skip
    assert "secretKeyRef" in environment["AWS_ACCESS_KEY_ID"]["valueFrom"]
    on_fsx = spec(PLACE, FSX)["containers"][0]["env"]
    assert "AWS_ACCESS_KEY_ID" not in {each["name"] for each in on_fsx}
    for secret in ("hf_secret", "typed in", "everything", "wandb", '"keys"'):
        assert secret not in json.dumps(spec(PLACE)), secret


def test_it_mounts_read_only_what_holds_the_bundle_the_code_and_the_checkpoints_alone() -> None:
    pod = spec(PLACE, FSX)
    assert [volume["name"] for volume in pod["volumes"]] == ["fsx", "code"]
    assert all(mount["readOnly"] for mount in pod["containers"][0]["volumeMounts"])


def test_a_suspects_job_is_bound_to_its_cordoned_node_and_the_comparisons_to_none_under_suspicion() -> None:
    suspect = spec(PLACE)
    terms = suspect["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["hyperpod-i-1"]}]}]
    tolerated = {each.get("key") for each in suspect["tolerations"]}
    assert tolerated >= {
        "truestep.ai/quarantine",
        "node.kubernetes.io/unschedulable",
        "sagemaker.amazonaws.com/node-health-status",
    }
    beside = comparison([PLACE], ["hyperpod-i-1", "hyperpod-i-2"])
    assert beside is not None
    pod = spec(beside)
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    # Kubernetes takes one value a field.
    assert [each["values"] for each in term["matchFields"]] == [["hyperpod-i-1"], ["hyperpod-i-2"]]
    assert term["matchExpressions"][0]["values"] == ["ml.p5.48xlarge"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}], "a blanket one would open a cordon"
    assert comparison([], ["n"]) is None


def test_a_nodes_gpus_and_kind_are_its_own_word() -> None:
    node = {
        "metadata": {"name": "n", "labels": {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}},
    }
    assert place_of(node, workload()) == Place(node_name="n", gpus=8, instance_type="ml.p5.48xlarge")


def test_a_job_has_the_same_name_whenever_it_is_asked_for_and_another_for_each_node() -> None:
    assert job_name("inc-0123456789abcdef", "a") == job_name("inc-0123456789abcdef", "a")
    assert len({job_name("inc-0123456789abcdef", key) for key in ("a", "b", "comparison")}) == 3
    assert len(job_name("inc-0123456789abcdef", "a")) <= 63


def test_a_specification_that_is_too_large_for_a_record_is_not_kept() -> None:
    huge = json.loads(json.dumps(POD))
    huge["spec"]["containers"][1]["env"].append({"name": "PYTHONPATH", "value": "/x:" * 10_000})
    refused = workload_of(huge, bundle_uri=S3, checkpoint_root="")
    assert (refused.pod, refused.container) == ({}, {})
    assert "more than the 16384 that are recorded" in refused.refused


# --- how far it is

WAITING = ConfirmedNode(node_name="", job_name="j", job_uid="uid-j", suspect=False)
SUSPECT = ConfirmedNode(node_name="n", job_name="j", job_uid="uid-j")


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "j-x"}, "spec": {"nodeName": "n"}, "status": status}


def state(**state: Any) -> dict[str, Any]:
    return pod(phase="Running", containerStatuses=[{"name": "istio", "state": {}}, {"name": "confirm", "state": state}])


def seen(document: dict[str, Any], waited: float = 0, node: ConfirmedNode = WAITING) -> ConfirmedNode:
    return progress(node, [document], suspects=["s"], alarm_id="a", waited_seconds=waited)


def test_a_pod_that_runs_is_waited_for_and_says_where_it_is() -> None:
    running = seen(state(running={}), waited=10_000)
    assert (running.ended, running.node_name) == (False, "n")


def test_a_report_in_the_termination_message_is_taken_whatever_the_exit_code() -> None:
    report = NodeReport(alarm_id="a", settled=True, devices=(DeviceReport(device="cpu", runs=3, differing=3),))
    ended = seen(state(terminated={"exitCode": 1, "message": report_bytes(report).decode()}))
    assert (ended.ended, ended.settled, ended.gpus, ended.problem) == (True, True, report.devices, "")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "no report"),
        ("Traceback ...\nModuleNotFoundError: No module named 'truestep'", "No module named 'truestep'"),
        ("{" * 4096, "cut off at 4096 bytes"),
        ('{"schema_version": 9}', "schema_version 9 is not supported"),
        (report_bytes(NodeReport(alarm_id="b")).decode(), "bundle of another alarm"),
        (report_bytes(NodeReport(problem="there is no bundle.json")).decode(), "there is no bundle.json"),
    ],
)
def test_anything_else_is_a_sentence(message: str, said: str) -> None:
    ended = seen(state(terminated={"exitCode": 2, "reason": "Error", "message": message}))
    assert ended.ended
    assert ended.gpus == ()
    assert said in ended.problem


def counted_as(**device: Any) -> str:
    return json.dumps({"schema_version": 1, "alarm_id": "a", "devices": [{"device": "cuda:0", "runs": 9, **device}]})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (counted_as(runs=0, differing=3), "$.devices[0].differing: is more than its runs (0)"),
        (counted_as(differing=10), "differing: is more than its runs (9)"),
        (counted_as(differing=10**400), "differing: is more than its runs (9)"),
        (counted_as(differing=-1), "differing: is negative"),
        (counted_as(runs=-5), "runs: is negative"),
        (counted_as(runs=100_000_001), "runs: is more than the most that can be (100,000,000)"),
        (counted_as(runs=10**400, differing=1), "runs: is more than"),
        (counted_as(runs=True), "expected int, got bool"),
        (counted_as(runs=9.0), "expected int, got float"),
        (counted_as(differing=1, as_recorded=2), "as_recorded: is more than its differing runs (1)"),
        (counted_as(gave={"0": 5, "1": 5}), "gave in all: is more than its runs (9)"),
        (counted_as(gave={"0": -1, "1": 5}), "gave: is negative"),
        (counted_as(gave={"\ud800": "x"}), "gave.\\ud800: expected int"),
        (counted_as(first="A" * 3000), "first: has 3000 characters, of 96"),
        (counted_as(gpu_uuid="A" * 129), "gpu_uuid: has 129 characters, of 128"),
        (counted_as(first="\ud800"), "not Unicode"),
        ("[]", "expected an object"),
    ],
)
def test_a_report_that_nobody_can_have_counted_is_malformed_and_shows_nothing(message: str, said: str) -> None:
    ended = seen(state(terminated={"exitCode": 1, "reason": "Error", "message": message}))
    assert (ended.ended, ended.settled, ended.gpus) == (True, False, ())
    assert "its report is malformed: " in ended.problem
    assert said in ended.problem
    ended.problem.encode()


def test_brackets_without_an_end_show_nothing_however_deep_python_may_go() -> None:
    message = '{"alarm_id":' + "[" * 4000
    terminated = state(terminated={"exitCode": 1, "reason": "Error", "message": message})
    before = sys.getrecursionlimit()
    for limit in (1000, 20_000):
        sys.setrecursionlimit(limit)
        try:
            ended = seen(terminated)
        finally:
            sys.setrecursionlimit(before)
        assert (ended.ended, ended.settled, ended.gpus) == (True, False, ())
        assert "with no report, but: " in ended.problem


def test_a_pod_that_finds_no_place_or_no_image_is_given_up_and_said_why() -> None:
    full = pod(
        phase="Pending",
        conditions=[{"type": "PodScheduled", "status": "False", "message": "0/5 nodes: Insufficient nvidia.com/gpu"}],
    )
    assert not seen(full, waited=59).ended
    given_up = seen(full, waited=60)
    assert given_up.ended
    assert "not started within 60 s" in given_up.problem
    assert "Insufficient nvidia.com/gpu" in given_up.problem
    assert not seen(full, waited=299, node=SUSPECT).ended
    assert seen(full, waited=300, node=SUSPECT).ended
    no_image = seen(state(waiting={"reason": "ImagePullBackOff", "message": "not found"}), waited=300, node=SUSPECT)
    assert "ImagePullBackOff: not found" in no_image.problem


def test_a_pod_that_the_node_refused_or_lost_has_ended() -> None:
    evicted = seen(pod(phase="Failed", reason="Evicted", message="the node was low on memory"))
    assert evicted.ended
    assert "low on memory" in evicted.problem


def test_a_job_without_a_pod_is_waited_for_until_it_failed_or_was_deleted() -> None:
    assert "deleted" in without_pod(WAITING, None, waited_seconds=0).problem
    alive = {"metadata": {"uid": "uid-j"}}
    assert "deleted" in without_pod(WAITING, {"metadata": {"uid": "made-again"}}, waited_seconds=0).problem
    failed = {**alive, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}}
    assert without_pod(WAITING, failed, waited_seconds=0).problem == "its Job failed: DeadlineExceeded"
    assert not without_pod(WAITING, alive, waited_seconds=299).ended
    assert without_pod(WAITING, alive, waited_seconds=300).ended


# --- whose it is

REPORTED = state(
    terminated={
        "exitCode": 0,
        "message": report_bytes(
            NodeReport(alarm_id="a", settled=True, devices=(DeviceReport(device="cpu", runs=3),))
        ).decode(),
    }
)


def owned(uid: str, name: str = "j-x", *, controller: bool = True, kind: str = "Job") -> dict[str, Any]:
    return {"metadata": {"name": name, "ownerReferences": [{"kind": kind, "uid": uid, "controller": controller}]}}


def test_only_a_pod_whose_controller_is_the_job_itself_is_its_pod() -> None:
    ours = owned("uid-j")
    labelled = {"metadata": {"name": "a", "labels": {"batch.kubernetes.io/job-name": "j", "truestep.ai/incident": "i"}}}
    others = [labelled, owned("uid-other"), owned("uid-j", controller=False), owned("uid-j", kind="ReplicaSet")]
    assert pods_of([*others, ours], "uid-j") == (ours,)
    assert pods_of([{"metadata": {}}, owned("")], "") == ()


def test_two_pods_that_claim_the_job_are_no_result() -> None:
    second = {**copy.deepcopy(REPORTED), "metadata": {"name": "a-forged"}}
    ended = progress(SUSPECT, [second, REPORTED], suspects=["n"], alarm_id="a", waited_seconds=0)
    assert (ended.ended, ended.gpus) == (True, ())
    assert "2 pods claim to be its Job's (a-forged, j-x)" in ended.problem


def test_a_pod_on_another_node_than_the_job_was_bound_to_reports_nothing() -> None:
    assert seen(REPORTED, node=SUSPECT).gpus
    elsewhere = {**REPORTED, "spec": {"nodeName": "m"}}
    ended = seen(elsewhere, node=SUSPECT)
    assert (ended.ended, ended.gpus) == (True, ())
    assert "j-x is on m, not on n" in ended.problem
    # A comparison's node is the scheduler's choice, but never one under suspicion.
    assert seen(elsewhere).gpus
    on_a_suspect = seen({**REPORTED, "spec": {"nodeName": "s"}})
    assert (on_a_suspect.ended, on_a_suspect.gpus) == (True, ())
    assert "a suspect itself" in on_a_suspect.problem
