"""Begins the deep health check of an incident's suspects, and looks how far it is."""

from __future__ import annotations

from collections import defaultdict

from lambdas.adapters.hyperpod import HyperPodError
from lambdas.adapters.runtime import Work
from lambdas.domain.cluster_health_check import NodeProgress, decide_check, labels_progress
from lambdas.domain.incident import iso
from lambdas.domain.records import HealthCheck, HealthCheckStatus, SuspectNode
from lambdas.ports import Cluster, HyperPod

RUNNING_STATUS = "DeepHealthCheckInProgress"


def begin_check(work: Work, cluster: Cluster, hyperpod: HyperPod, *, approved: bool) -> HealthCheck:
    """Start the check if the policy lets it start now; a check that already runs on the suspects counts as started.

    approved: by a decision that was verified, since HyperPod may replace by itself what fails its check.
    A refusal by HyperPod is a skipped check, not an error: nothing in the recovery depends on its result.
    """
    incident = work.incident
    suspects = [suspect for suspect in incident.suspects if suspect.present and suspect.instance_id]
    decision = decide_check(
        work.policy,
        automatic_recovery=hyperpod.automatic_recovery(),
        approved=approved,
        dry_run=incident.dry_run,
        instance_ids=[suspect.instance_id for suspect in suspects],
    )
    reason, status = decision.reason, decision.status
    before = {suspect.instance_id: _label(cluster, suspect.node_name) for suspect in suspects}
    if status is HealthCheckStatus.STARTED:
        try:
            _start(hyperpod, suspects)
        except HyperPodError as error:
            status, reason = HealthCheckStatus.SKIPPED, f"HyperPod did not start it: {error}"
    return HealthCheck(
        status=status,
        reason=reason,
        instance_ids=tuple(suspect.instance_id for suspect in suspects),
        started_at=iso(work.now) if status is HealthCheckStatus.STARTED else "",
        labels_before=before,
    )


def progress_of(check: HealthCheck, cluster: Cluster, hyperpod: HyperPod) -> tuple[NodeProgress, ...]:
    """What can be seen of the check on each of its instances now."""
    seen = []
    for instance_id in check.instance_ids:
        state = hyperpod.instance(instance_id=instance_id)
        seen.append(
            NodeProgress(
                instance_id=instance_id,
                instance_status=state.status if state else "",
                label=_label(cluster, state.node_name) if state else "",
                label_before=check.labels_before.get(instance_id, ""),
            )
        )
    return tuple(seen)


def _start(hyperpod: HyperPod, suspects: list[SuspectNode]) -> None:
    groups: dict[str, list[str]] = defaultdict(list)
    for suspect in suspects:
        state = hyperpod.instance(instance_id=suspect.instance_id)
        if state is not None and state.status != RUNNING_STATUS:
            groups[suspect.instance_group].append(suspect.instance_id)
    for group, instance_ids in groups.items():
        hyperpod.start_health_check(group, instance_ids)


def _label(cluster: Cluster, node_name: str) -> str:
    node = cluster.node(node_name)
    return "" if node is None else labels_progress(node["metadata"].get("labels") or {})
