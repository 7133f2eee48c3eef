"""Stopping, starting and telling apart the pods of training jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lambdas.domain.cluster_jobs import (
    JOB_KINDS,
    PodView,
    StopProgress,
    UnknownJobKindError,
    expected_pods,
    is_suspended,
    job_kind,
    judge_starting,
    judge_stopping,
    others_on_node,
    pod_view,
    queue_labels,
    queue_of,
    suspend_patch,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pod(name: str = "job-0", phase: str = "Running", **changes: Any) -> PodView:
    fields: dict[str, Any] = {"namespace": "team-a", "name": name, "uid": "u", "node_name": "n", "phase": phase}
    return PodView(**{**fields, "terminating": False, "job_name": "job", **changes})


@pytest.mark.parametrize("kind", sorted(JOB_KINDS))
def test_a_suspend_patch_sets_exactly_what_is_read_back(kind: str) -> None:
    how = job_kind(kind)
    assert is_suspended(how, suspend_patch(how, True))
    assert not is_suspended(how, suspend_patch(how, False))
    assert not is_suspended(how, {})


def test_hyperpod_jobs_are_suspended_below_run_policy() -> None:
    assert suspend_patch(job_kind("HyperPodPyTorchJob"), True) == {"spec": {"runPolicy": {"suspend": True}}}


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(UnknownJobKindError, match="HyperPodPyTorchJob"):
        job_kind("RayJob")


def stopping(*pods: PodView, suspended: bool = True, waited: int = 0) -> StopProgress:
    limit = timedelta(seconds=60)
    asked_at = NOW - timedelta(seconds=waited)
    return judge_stopping(pods, suspended=suspended, asked_at=asked_at, now=NOW, limit=limit).progress


def test_stopped_means_suspended_and_no_unfinished_pod() -> None:
    assert stopping() is StopProgress.STOPPED
    assert stopping(pod(phase="Succeeded"), pod(phase="Failed")) is StopProgress.STOPPED
    assert stopping(pod(terminating=True)) is StopProgress.PENDING
    assert stopping(suspended=False) is StopProgress.PENDING


def test_a_job_that_does_not_stop_in_time_is_overdue() -> None:
    assert stopping(pod(), waited=59) is StopProgress.PENDING
    assert stopping(pod(), waited=60) is StopProgress.OVERDUE
    assert stopping(suspended=False, waited=60) is StopProgress.OVERDUE
    assert stopping(waited=600) is StopProgress.STOPPED


def test_a_relaunched_job_runs_once_it_has_pods_and_each_has_started() -> None:
    assert judge_starting([pod(), pod(phase="Succeeded")])[0]
    assert not judge_starting([])[0]
    assert not judge_starting([pod(), pod(phase="Pending")])[0]
    assert not judge_starting([pod(terminating=True)])[0], "pods of the stopped run are not the new run's"
    assert judge_starting([pod()], expected=2) == (False, "of 2 pods, 1 not there yet")
    assert judge_starting([pod("a"), pod("b")], expected=2) == (True, "2 pods, all running")


def test_pods_that_failed_have_not_started() -> None:
    """So ends every start that the SDK refuses: a banned GPU, a tombstone, two orders that contradict."""
    failed = [pod("w-1", phase="Failed"), pod("w-0", phase="Failed")]
    said = "of 2 pods, 2 failed: w-0, w-1; the log of w-0 says why"
    assert judge_starting(failed, expected=2) == (False, said)
    assert judge_starting(failed) == (False, said)
    assert not judge_starting([pod(), pod("w-1", phase="Failed")])[0]
    assert judge_starting([pod(), pod("w-2"), pod("w-1", phase="Failed")], expected=2)[0], "another pod took its place"


@pytest.mark.parametrize(
    ("kind", "spec", "pods"),
    [
        ("HyperPodPyTorchJob", {"replicaSpecs": [{"name": "a", "replicas": 3}, {"name": "b"}]}, 4),
        ("PyTorchJob", {"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 7}}}, 8),
        ("PyTorchJob", {"pytorchReplicaSpecs": {"Worker": {"replicas": 7}}, "elasticPolicy": {"minReplicas": 2}}, 2),
        ("TrainJob", {"trainer": {"numNodes": 5}}, 5),
        ("TrainJob", {"trainer": {}}, 0),
        ("JobSet", {"replicatedJobs": [{"replicas": 2, "template": {"spec": {"parallelism": 4}}}]}, 8),
        ("Job", {"parallelism": 6}, 6),
        ("Job", {}, 1),
    ],
)
def test_a_jobs_spec_says_how_many_pods_it_has(kind: str, spec: dict[str, Any], pods: int) -> None:
    assert expected_pods(job_kind(kind), {"spec": spec}) == pods


def test_neighbours_are_unfinished_pods_of_other_workloads() -> None:
    pods = [
        pod(),
        pod("b", job_name="other"),
        pod("same-name-elsewhere", namespace="team-b"),
        pod("plain", job_name=""),
        pod("done", phase="Succeeded", job_name="other"),
        pod("agent", job_name="", from_daemon_set=True),
        pod("confirmation", job_name="truestep-confirm-1", confirms=True),
    ]
    assert [entry.name for entry in others_on_node(pods, "team-a", "job")] == ["b", "plain", "same-name-elsewhere"]


def test_a_pod_document_is_read_by_its_labels_and_owners() -> None:
    document = {
        "metadata": {
            "namespace": "team-a",
            "name": "job-worker-0",
            "uid": "u",
            "labels": {"HPJob": "job"},
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{"kind": "HyperPodPyTorchJob"}],
        },
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running"},
    }
    view = pod_view(document)
    assert (view.job_name, view.node_name, view.terminating, view.from_daemon_set) == ("job", "n", True, False)


def test_a_job_of_ours_waits_by_the_labels_of_the_training_jobs_queue_alone() -> None:
    both = {"kueue.x-k8s.io/queue-name": "gpu", "kueue.x-k8s.io/priority-class": "high"}
    assert queue_labels({"metadata": {"labels": {**both, "team": "a"}}}) == both
    assert queue_labels({"metadata": {"labels": {"kueue.x-k8s.io/priority-class": "high"}}}) == {}
    assert queue_labels({"metadata": {}}) == {}


def test_the_queue_that_manages_a_job_is_named() -> None:
    assert queue_of({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpu"}}}) == "gpu"
    assert queue_of({"metadata": {}}) == ""
