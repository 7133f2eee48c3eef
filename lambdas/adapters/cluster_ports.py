"""The cluster-side ports of one piece of work, and their dry-run twins: the same looks, the same plans, no change."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import boto3

from lambdas.adapters.aws import client
from lambdas.adapters.checkpoints import CheckpointCatalogue
from lambdas.adapters.eks_access import connect
from lambdas.adapters.hyperpod import HyperPodCluster
from lambdas.adapters.kubernetes import Kubernetes
from lambdas.adapters.metrics import PrometheusMetrics
from lambdas.adapters.runtime import Work
from lambdas.domain.checkpoint_choice import Candidate
from lambdas.domain.cluster_jobs import PodView
from lambdas.domain.cluster_nodes import CordonPlan, ReleasePlan, plan_cordon, plan_release
from lambdas.domain.cluster_replacement import ReplaceAnswer
from lambdas.domain.records import JobKey
from lambdas.ports import BatchJobs, CheckpointCatalog, Cluster, HyperPod, InstanceState, Metrics, RecordedCheckpoint
from truestep.contract import CheckpointRef, ResumeDirective


def session() -> boto3.Session:
    """A boto3 session in the function's region."""
    return boto3.Session(region_name=os.environ.get("AWS_REGION"))


def cluster_of(work: Work) -> Cluster:
    """The Kubernetes API of the incident's cluster. Raises `SettingsError` for one that is not served."""
    name = work.settings.cluster(work.incident.job.cluster_arn).eks_cluster_name
    cluster: Cluster = _kubernetes(name, os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION"))
    return DryRunCluster(cluster) if work.incident.dry_run else cluster


def batch_jobs_of(work: Work) -> BatchJobs:
    """The recovery's own Jobs in the incident's cluster. A dry run starts none, so it has no use for them."""
    assert not work.incident.dry_run, "a dry run starts no Job"
    name = work.settings.cluster(work.incident.job.cluster_arn).eks_cluster_name
    return _kubernetes(name, os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION"))


def hyperpod_of(work: Work) -> HyperPod:
    """The HyperPod control plane of the incident's cluster. Raises `SettingsError` for one that is not served."""
    name = work.settings.cluster(work.incident.job.cluster_arn).hyperpod_cluster_name
    hyperpod: HyperPod = HyperPodCluster(client("sagemaker"), name)
    return DryRunHyperPod(hyperpod) if work.incident.dry_run else hyperpod


def catalogue_of(work: Work) -> CheckpointCatalog:
    """The checkpoints that the incident's cluster may keep. Raises `SettingsError` for a cluster that is not served."""
    locations = work.settings.cluster(work.incident.job.cluster_arn).checkpoint_buckets
    catalogue: CheckpointCatalog = CheckpointCatalogue(client("s3"), locations)
    return DryRunCatalogue(catalogue) if work.incident.dry_run else catalogue


def metrics_of(work: Work) -> Metrics | None:
    """The metrics workspace of the incident's cluster; None where none is configured."""
    url = work.settings.cluster(work.incident.job.cluster_arn).amp_query_url
    return PrometheusMetrics(session(), url) if url else None


@functools.lru_cache(maxsize=16)
def _kubernetes(eks_cluster_name: str, endpoint_url: str | None, region: str | None) -> Kubernetes:  # noqa: ARG001
    """One client a process and cluster; where the endpoint changes, so does the client."""
    return Kubernetes(connect(session(), eks_cluster_name))


class DryRunCluster:
    """`Cluster` that looks and plans, and writes nothing."""

    def __init__(self, inner: Cluster) -> None:
        self._inner = inner

    def node(self, name: str) -> Mapping[str, Any] | None:
        return self._inner.node(name)

    def cordon(self, name: str, incident_id: str, at: str) -> CordonPlan | None:
        node = self._inner.node(name)
        if node is None:
            return None
        plan = plan_cordon(node, incident_id, at)
        return dataclasses.replace(plan, reason=_only_planned(plan.reason, bool(plan.patch)))

    def release(self, name: str, incident_id: str) -> ReleasePlan | None:
        node = self._inner.node(name)
        if node is None:
            return None
        plan = plan_release(node, incident_id)
        return dataclasses.replace(plan, reason=_only_planned(plan.reason, bool(plan.patch)))

    def pod(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        return self._inner.pod(namespace, name)

    def pods_on(self, node_name: str) -> tuple[PodView, ...]:
        return self._inner.pods_on(node_name)

    def job(self, job: JobKey) -> Mapping[str, Any] | None:
        return self._inner.job(job)

    def job_pods(self, job: JobKey) -> tuple[PodView, ...]:
        return self._inner.job_pods(job)

    def suspend(self, job: JobKey) -> bool:
        return self._inner.job(job) is not None

    def unsuspend(self, job: JobKey) -> bool:
        return self._inner.job(job) is not None

    def log_tail(self, namespace: str, pod_name: str, lines: int) -> str | None:
        return self._inner.log_tail(namespace, pod_name, lines)

    def write_directive(self, job: JobKey, directive: ResumeDirective) -> bool:
        return self._inner.read_directive(job) != directive

    def read_directive(self, job: JobKey) -> ResumeDirective | None:
        return self._inner.read_directive(job)


class DryRunHyperPod:
    """`HyperPod` that looks, and asks for nothing."""

    def __init__(self, inner: HyperPod) -> None:
        self._inner = inner

    def instances(self) -> tuple[InstanceState, ...]:
        return self._inner.instances()

    def instance(self, *, instance_id: str = "", logical_id: str = "") -> InstanceState | None:
        return self._inner.instance(instance_id=instance_id, logical_id=logical_id)

    def describe_node(self, *, instance_id: str = "", logical_id: str = "") -> Mapping[str, Any] | None:
        return self._inner.describe_node(instance_id=instance_id, logical_id=logical_id)

    def automatic_recovery(self) -> bool:
        return self._inner.automatic_recovery()

    def start_health_check(self, instance_group: str, instance_ids: Sequence[str]) -> None:
        """Nothing is started."""

    def replace(self, instance_id: str) -> ReplaceAnswer:  # noqa: ARG002
        return ReplaceAnswer(accepted=True, message="dry run: nothing was asked for")


class DryRunCatalogue:
    """`CheckpointCatalog` that revokes nothing."""

    def __init__(self, inner: CheckpointCatalog) -> None:
        self._inner = inner

    def candidates(self, root_uri: str, recorded: Iterable[RecordedCheckpoint]) -> tuple[Candidate, ...]:
        return self._inner.candidates(root_uri, recorded)

    def missing_files(self, checkpoint: CheckpointRef) -> str:
        return self._inner.missing_files(checkpoint)

    def revoke(self, checkpoint: CheckpointRef, *, incident_id: str, reason: str, at: str) -> bool:  # noqa: ARG002
        return False


def _only_planned(reason: str, would_write: bool) -> str:
    return f"dry run, nothing was written; it would be: {reason}" if would_write else reason
