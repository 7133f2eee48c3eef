"""ConfirmSuspect's Jobs: made once, bound to cordoned nodes, given up with a sentence, and deleted."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from lambdas.adapters.cluster_ports import cluster_of
from lambdas.adapters.confirming import give_back_cleared
from lambdas.adapters.kubernetes import BatchJob, Kubernetes, KubernetesError, Pod
from lambdas.adapters.runtime import _work
from lambdas.domain.cluster_jobs import CONFIRMATION_LABEL
from lambdas.domain.errors import TransientError
from lambdas.domain.incident import Incident
from lambdas.domain.records import Confirmation, ConfirmationStatus
from lambdas.domain.workflow import abandoned, resume_refused, resumed
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import NAMESPACE, World, unique, wait_until
from tests.unit.bundle.computation import Witness
from truestep.contract import AlarmId, VerdictKind
from truestep.inject import FAULT_VARIABLE

ALARM = "a" * 32
LATE = {"bundle_failed": "not written within 60 s; it may be complete later"}


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    """A bundle that says so at once: what a real one shows, `tests.least_privilege` and the demo see."""
    directory = tmp_path / "bundles" / ALARM
    directory.mkdir(parents=True)
    (directory / "bundle.json").write_text("{}")
    return directory.as_uri()


@pytest.fixture
def recovery(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> Recovery:
    policy = {"poll_seconds": 1, "max_quarantined_nodes": 5, "max_quarantined_percent": 100, "confirm_runs": 3}
    policy |= {"health_check": "skip"}
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps(policy))
    return recovery


Opener = Callable[..., Incident]


@pytest.fixture
def accuse(recovery: Recovery, bundle: str) -> Opener:
    """Opens an incident, and takes it as far as the stopped job."""

    def opened(**options: Any) -> Incident:
        fields = {"alarm_id": AlarmId(ALARM), "evidence": {"bundle_uri": bundle}, **options}
        incident_id = recovery.open(**fields).incident_id
        assert recovery.run("resolve_node", incident_id)["outcome"] in ("resolved", "ambiguous")
        assert recovery.run("cordon_node", incident_id)["outcome"] == "cordoned"
        assert recovery.settle("stop_training", incident_id)["outcome"] == "stopped"
        return recovery.load(incident_id)

    return opened


def jobs(world: World, incident: Incident) -> list[str]:
    labels = {CONFIRMATION_LABEL: incident.incident_id}
    return [job["metadata"]["name"] for job in world.admin.list(BatchJob, namespace=NAMESPACE, labels=labels)]


def all_placed(world: World, incident: Incident) -> list[Any] | None:
    pods = confirming_pods(world, incident)
    return pods if len(pods) == 3 and all(pod["spec"].get("nodeName") for pod in pods) else None


def test_its_jobs_are_made_once_and_deleted_before_the_health_check_even_where_their_record_was_lost(
    recovery: Recovery, world: World, accuse: Opener
) -> None:
    incident = accuse(kind=VerdictKind.AMBIGUOUS, accused=2)
    made: list[str] = []
    for _ in range(2):
        # The second time as after a death between the Jobs and their record.
        recovery.store.save(recovery.load(incident.incident_id).evolve(confirmation=None))
        assert recovery.run("confirm_suspect", incident.incident_id)["outcome"] == "pending"
        made = made or jobs(world, incident)
        assert jobs(world, incident) == made
    assert len(made) == 3, "both suspects, and a healthy node"
    placed = {pod["spec"]["nodeName"] for pod in wait_until(lambda: all_placed(world, incident), "the pods' places")}
    assert placed > {suspect.node_name for suspect in incident.suspects}, "the cordon does not keep them out"
    recovery.store.save(recovery.load(incident.incident_id).evolve(confirmation=None))
    assert recovery.run("start_health_check", incident.incident_id)["outcome"] == "skipped"
    assert jobs(world, incident) == []
    wait_until(lambda: not confirming_pods(world, incident), "the confirmation's pods to go")


def test_its_jobs_do_not_outlive_it_where_its_execution_is_stopped(
    recovery: Recovery, world: World, accuse: Opener
) -> None:
    """They would hold the GPUs of the suspect's and of a healthy node beside the relaunched job."""
    incident = accuse()
    ident = incident.incident_id
    assert recovery.run("confirm_suspect", ident)["outcome"] == "pending"
    assert len(jobs(world, incident)) == 2
    ended = abandoned(recovery.load(ident), execution="arn:e", status="ABORTED", why="", now=datetime.now(UTC))
    assert ended is not None
    for state in ("RequestApproval", "ChooseCheckpoint", "Relaunch", "VerifyRecovery"):
        assert "StartHealthCheck, which ends it" in resume_refused(ended, state, holder=ident)
    for state in ("ConfirmSuspect", "StartHealthCheck", "CloseIncident"):
        assert resume_refused(ended, state, holder=ident) == ""
    recovery.store.save(resumed(ended, "StartHealthCheck", by="by link", now=datetime.now(UTC)))
    assert recovery.run("start_health_check", ident)["outcome"] == "skipped"
    assert jobs(world, incident) == []
    left = recovery.load(ident)
    assert left.confirmation is not None
    assert left.confirmation.status is ConfirmationStatus.SKIPPED
    ended = abandoned(left, execution="arn:f", status="ABORTED", why="", now=datetime.now(UTC))
    assert ended is not None
    assert resume_refused(ended, "Relaunch", holder=ident) == ""


def test_a_cleared_suspect_is_given_back_once_however_often_the_state_dies_before_its_record(
    recovery: Recovery, world: World, accuse: Opener
) -> None:
    incident = accuse(kind=VerdictKind.AMBIGUOUS, accused=2)
    faulty, innocent = incident.suspects
    settled = Confirmation(status=ConfirmationStatus.REPRODUCED, reason="", named=faulty.node_name)
    work = _work("confirm_suspect", {"incident_id": incident.incident_id})
    for _ in range(2):
        after, said = give_back_cleared(work, cluster_of(work), settled)
        assert innocent.node_name in said
        assert [suspect.node_name for suspect in after.suspects] == [faulty.node_name]
        assert [suspect.node_name for suspect in after.cleared] == [innocent.node_name]
        assert not world.node(innocent.node_name)["spec"].get("unschedulable")
        assert world.node(faulty.node_name)["spec"]["unschedulable"]
        assert recovery.store.node_holder(innocent.claim_key) is None
        assert recovery.store.node_holder(faulty.claim_key) == incident.incident_id


def confirming_pods(world: World, incident: Incident) -> list[Any]:
    return list(world.admin.list(Pod, namespace=NAMESPACE, labels={CONFIRMATION_LABEL: incident.incident_id}))


def test_a_bundle_that_is_broken_is_recorded_with_its_reason_and_so_is_a_cluster_that_refuses(
    recovery: Recovery, world: World, accuse: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident = accuse()

    def refused(*_: object) -> None:
        raise KubernetesError("cannot create Job: HTTP 403: apply the manifests")

    with monkeypatch.context() as patched:
        patched.setattr(Kubernetes, "create_batch_job", refused)
        recovery.run("confirm_suspect", incident.incident_id)
        answer = recovery.run("confirm_suspect", incident.incident_id)
    assert answer["outcome"] == "skipped"
    assert "HTTP 403: apply the manifests" in answer["reason"]
    assert jobs(world, incident) == []

    recovery.store.save(recovery.load(incident.incident_id).evolve(confirmation=None))
    answer = recovery.settle("confirm_suspect", incident.incident_id, seconds=60)
    assert answer["outcome"] == "skipped"
    assert "bundle.json cannot be read" in answer["reason"]


def test_a_job_of_our_name_that_is_somebody_elses_is_neither_used_nor_deleted(
    recovery: Recovery, world: World, accuse: Opener
) -> None:
    incident = accuse()
    recovery.run("confirm_suspect", incident.incident_id)
    ours = jobs(world, incident)
    recovery.run("start_health_check", incident.incident_id)
    left_behind = recovery.load(incident.incident_id).confirmation
    assert left_behind is not None
    assert left_behind.status is ConfirmationStatus.SKIPPED, "nothing runs any more, and the page must not say so"
    assert "left before the runs had ended" in left_behind.reason
    recovery.store.save(recovery.load(incident.incident_id).evolve(confirmation=None))
    container = {"name": "c", "image": "c", "command": ["python", "-c", ""]}
    spec = {"template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}
    # One without our label, and one with it: the name and the label are for everybody to give.
    for name, labels in zip(ours, ({}, {CONFIRMATION_LABEL: incident.incident_id}), strict=True):
        metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
        world.admin.create(BatchJob({"metadata": metadata, "spec": spec}))
    recovery.run("confirm_suspect", incident.incident_id)
    known = recovery.load(incident.incident_id).confirmation
    assert known is not None
    assert [(node.job_name, "of somebody else" in node.problem) for node in known.nodes] == [("", True)] * 2
    assert "of somebody else" in recovery.run("confirm_suspect", incident.incident_id)["reason"]
    recovery.run("start_health_check", incident.incident_id)
    left = {job["metadata"]["name"] for job in world.admin.list(BatchJob, namespace=NAMESPACE)}
    assert set(ours) <= left
    for name in ours:
        world.admin.delete(BatchJob, name, namespace=NAMESPACE)


def test_a_job_of_the_name_that_comes_at_the_same_moment_is_looked_at_again(kubernetes: Kubernetes) -> None:
    template = {"spec": {"containers": [{"name": "c", "image": "c", "command": ["true"]}], "restartPolicy": "Never"}}
    manifest = {"metadata": {"name": "twice", "namespace": NAMESPACE}, "spec": {"template": template}}
    kubernetes.create_batch_job(manifest)
    with pytest.raises(TransientError, match="a moment ago"):
        kubernetes.create_batch_job(manifest)
    assert kubernetes.delete_batch_job(NAMESPACE, "twice")
    assert not kubernetes.delete_batch_job(NAMESPACE, "twice")


def running(world: World, incident: Incident) -> bool:
    phases = [(pod.get("status") or {}).get("phase") for pod in confirming_pods(world, incident)]
    return phases == ["Running"] * 2


@pytest.mark.parametrize(
    ("waits", "elsewhere"),
    [(False, False), (True, False), (False, True)],
    ids=["before the state", "while it waits", "away from the checkpoints"],
)
def test_a_bundle_that_is_finished_after_its_alarm_is_run_all_the_same(
    recovery: Recovery, world: World, accuse: Opener, tmp_path: Path, waits: bool, elsewhere: bool
) -> None:
    root = tmp_path / "run"
    evidence = {**LATE, "bundle_expected": f"{root.as_uri()}/bundles/{ALARM}"}
    checkpoints = tmp_path / "checkpoints" if elsewhere else root
    incident = accuse(evidence=evidence, checkpoint_root=checkpoints.as_uri())
    if waits:
        assert recovery.run("confirm_suspect", incident.incident_id)["outcome"] == "pending"
        wait_until(lambda: running(world, incident), "both of the confirmation's pods to look for the bundle")
    root.mkdir()
    assert Witness().write(root)["bundle_uri"] == f"{root.as_uri()}/bundles/{ALARM}"
    answer = recovery.settle("confirm_suspect", incident.incident_id, seconds=120)
    known = recovery.load(incident.incident_id).confirmation
    assert known is not None
    assert (answer["outcome"], known.status) == ("recorded", ConfirmationStatus.NOT_REPRODUCED), answer
    assert [[gpu.runs for gpu in node.gpus] for node in known.nodes] == [[3], [3]]


def test_a_bundle_that_never_comes_ends_the_confirmation_in_bounded_time_with_a_sentence(
    recovery: Recovery, world: World, accuse: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = json.loads(os.environ["TRUESTEP_POLICY"])
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({**policy, "confirm_timeout_seconds": 8}))
    evidence = {**LATE, "bundle_expected": f"{tmp_path.as_uri()}/bundles/{ALARM}"}
    incident = accuse(evidence=evidence, checkpoint_root=tmp_path.as_uri())
    shutil.rmtree(tmp_path / "bundles")
    answer = recovery.settle("confirm_suspect", incident.incident_id, seconds=90)
    assert answer["outcome"] == "skipped"
    assert "has no bundle.json after 2 s" in answer["reason"]
    assert "the alarm went out without it: not written within 60 s" in answer["reason"]


@pytest.mark.parametrize("named", ["another workload's pod", "another workload's pod by its UID", "a UID that was"])
def test_it_is_made_of_the_accused_jobs_own_pod_and_of_no_other_that_an_event_names(
    recovery: Recovery, world: World, bundle: str, named: str
) -> None:
    """Whoever may send this namespace's events has no right in Kubernetes for that: a Job has identity and volumes."""
    incident = recovery.open(evidence={"bundle_uri": bundle})
    (row,) = incident.alarm.suspects
    name = unique("warehouse")
    spec = {"nodeName": row.node_name, "serviceAccountName": "warehouse-admin", "restartPolicy": "Never"}
    container = {"name": "c", "image": "c", "command": ["python", "-c", "import time; time.sleep(600)"]}
    pod = Pod({"metadata": {"name": name, "namespace": NAMESPACE}, "spec": {**spec, "containers": [container]}})
    uid = str(world.admin.create(pod)["metadata"]["uid"])
    changes = {
        "another workload's pod": {"pod_name": name},
        "another workload's pod by its UID": {"pod_name": name, "pod_uid": uid},
        "a UID that was": {"pod_uid": "uid-of-the-pod-before"},
    }[named]
    alarm = dataclasses.replace(incident.alarm, suspects=(dataclasses.replace(row, **changes),))
    recovery.store.save(incident.evolve(alarm=alarm))
    try:
        answer = recovery.run("resolve_node", incident.incident_id)
        assert answer["outcome"] == "ambiguous"
        assert ("is a pod of no job" if "pod_name" in changes else "has been re-created") in answer["reason"]
        recovery.run("cordon_node", incident.incident_id)
        recovery.settle("stop_training", incident.incident_id)
        answer = recovery.run("confirm_suspect", incident.incident_id)
        assert (answer["outcome"], jobs(world, incident)) == ("skipped", [])
        assert "no suspect's pod was there any more, or certain" in answer["reason"]
    finally:
        world.admin.delete(Pod, name, namespace=NAMESPACE, grace_period=0)


@pytest.mark.parametrize("root", ["file://[::1/x", "s3://b]/x"])
def test_an_address_that_no_parser_takes_does_not_keep_a_suspect_open(recovery: Recovery, root: str) -> None:
    """The alarm's schema takes it."""
    ident = recovery.open(checkpoint_root=root, evidence={"bundle_uri": f"{root}/bundles/x"}).incident_id
    assert recovery.run("resolve_node", ident)["outcome"] == "resolved"
    assert recovery.run("cordon_node", ident)["outcome"] == "cordoned"


def test_a_bundles_address_reads_nothing_of_the_jobs_environment(
    recovery: Recovery, world: World, accuse: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes expands $(NAME) in a command from the container's variables, and the address is the alarm's word."""
    policy = json.loads(os.environ["TRUESTEP_POLICY"])
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({**policy, "confirm_timeout_seconds": 8}))
    address = "file:///tmp/$(AWS_SECRET_ACCESS_KEY)/$$(PATH)/bundles/x"
    incident = accuse(evidence={"bundle_uri": address})
    assert incident.workload is not None
    # As a kubelet has it once it has read the Secret of the reference that is kept for bundles in S3.
    container = {**incident.workload.container, "env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "hunter2hunter2"}]}
    workload = dataclasses.replace(incident.workload, container=container)
    recovery.store.save(incident.evolve(workload=workload))
    answer = recovery.settle("confirm_suspect", incident.incident_id, seconds=90)
    assert f"{address} has no bundle.json after 2 s" in answer["reason"]


def test_the_job_has_the_config_map_whose_keys_are_variables_of_the_training(
    recovery: Recovery, world: World, accuse: Opener, tmp_path: Path
) -> None:
    """Seen by what it does: the fault that the ConfigMap asks for comes wherever the computation runs."""
    fault = {"site": "module_output", "target": "blocks.0", "element": 3, "bit": 20}
    metadata = ObjectMeta(name="faults", namespace=NAMESPACE)
    world.admin.create(ConfigMap(metadata=metadata, data={FAULT_VARIABLE: json.dumps(fault)}))
    (tmp_path / "run").mkdir()
    incident = accuse(evidence={"bundle_uri": Witness().write(tmp_path / "run")["bundle_uri"]}, config_map="faults")
    answer = recovery.settle("confirm_suspect", incident.incident_id, seconds=120)
    known = recovery.load(incident.incident_id).confirmation
    assert known is not None
    assert (answer["outcome"], known.status) == ("recorded", ConfirmationStatus.SOFTWARE), answer
    assert [[(gpu.runs, gpu.differing) for gpu in node.gpus] for node in known.nodes] == [[(3, 3)], [(3, 3)]]


def test_for_a_bundle_that_will_not_come_no_job_is_made(recovery: Recovery, world: World, accuse: Opener) -> None:
    incident = accuse(evidence={"bundle_failed": "StorageError: read-only file system", "bundle_expected": ""})
    answer = recovery.run("confirm_suspect", incident.incident_id)
    assert (answer["outcome"], jobs(world, incident)) == ("skipped", [])
    assert "no evidence bundle to run again: StorageError: read-only file system" in answer["reason"]
