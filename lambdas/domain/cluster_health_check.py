"""HyperPod's deep health check of the suspects: whether it may start now, and what its end means. Pure.

A pass clears nobody: vendor suites run their own patterns and miss most corrupting GPUs. The words are recorded for the
person who decides, and no state of the workflow branches on passed or failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lambdas.domain.policy import HealthCheckWhen, Policy
from lambdas.domain.records import HealthCheckStatus

PROGRESS_LABEL = "sagemaker.amazonaws.com/deep-health-check-status"
REPORT_SECONDS = 30.0
"""How long after the start an unchanged label still means "not begun yet"."""


@dataclass(frozen=True, kw_only=True)
class CheckDecision:
    """Whether a check starts, and why."""

    status: HealthCheckStatus
    """`STARTED` (start it), `SKIPPED` or `DEFERRED`."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeProgress:
    """What can be seen of one instance's check."""

    instance_id: str
    instance_status: str
    """``InstanceStatus.Status``; empty where the instance is gone."""
    label: str
    """Value of `PROGRESS_LABEL` on its node; empty without one."""
    label_before: str = ""
    """The label before this check was started: nodes keep that of earlier checks."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The state of the check; None while it runs."""

    status: HealthCheckStatus | None
    reason: str


def decide_check(
    policy: Policy, *, automatic_recovery: bool, approved: bool, dry_run: bool, instance_ids: Iterable[str]
) -> CheckDecision:
    """Start, skip or defer the check.

    automatic_recovery: the cluster's ``NodeRecovery`` is Automatic, so a failed check reboots or replaces the node
    without asking; then it waits for the approval unless the policy allows that.
    """
    skipped, deferred = HealthCheckStatus.SKIPPED, HealthCheckStatus.DEFERRED
    if policy.health_check is HealthCheckWhen.SKIP:
        return CheckDecision(status=skipped, reason="the policy skips health checks")
    if not tuple(instance_ids):
        return CheckDecision(status=skipped, reason="no suspect node has a HyperPod instance to check")
    if dry_run:
        return CheckDecision(status=skipped, reason="dry run: no health check was started")
    if not approved and policy.health_check is HealthCheckWhen.AFTER_APPROVAL:
        return CheckDecision(status=deferred, reason="the policy runs the health check after the approval")
    if not approved and automatic_recovery and not policy.allow_automatic_replacement:
        return CheckDecision(
            status=deferred,
            reason="the cluster's NodeRecovery is Automatic: a failed check would reboot or replace the node on its "
            "own, and the policy does not allow that before the approval",
        )
    return CheckDecision(
        status=HealthCheckStatus.STARTED, reason="deep health check (stress and connectivity) of the suspects started"
    )


def settle_check(progress: Iterable[NodeProgress], *, running_seconds: float, limit_seconds: float) -> Settlement:
    """What the check's end says; still running while any instance is, until the limit.

    running_seconds: since it was started.
    """
    seen = tuple(progress)
    gone = [entry.instance_id for entry in seen if not entry.instance_status]
    if gone:
        return Settlement(
            status=HealthCheckStatus.UNKNOWN,
            reason=f"{', '.join(gone)} left the cluster during the check (HyperPod may have replaced it)",
        )
    running = [entry for entry in seen if _running(entry) or (_silent(entry) and running_seconds < REPORT_SECONDS)]
    if running and running_seconds < limit_seconds:
        return Settlement(status=None, reason="; ".join(_sentence(entry) for entry in running))
    sentences = "; ".join(_sentence(entry) for entry in seen)
    if running:
        return Settlement(
            status=HealthCheckStatus.UNKNOWN,
            reason=f"the check did not end within {limit_seconds:.0f} s and is not waited for any longer: {sentences}",
        )
    if any(entry.label == "Failed" or entry.instance_status == "Failure" for entry in seen):
        return Settlement(status=HealthCheckStatus.FAILED, reason=f"failed: {sentences}")
    if all(entry.label == "Passed" for entry in seen):
        return Settlement(
            status=HealthCheckStatus.PASSED,
            reason=f"passed, which clears nobody: such checks miss most corrupting GPUs ({sentences})",
        )
    return Settlement(status=HealthCheckStatus.SKIPPED, reason=f"HyperPod did not run it on every node: {sentences}")


def labels_progress(labels: Mapping[str, str]) -> str:
    """The progress word of a node's labels; empty without one."""
    return labels.get(PROGRESS_LABEL, "")


def _running(entry: NodeProgress) -> bool:
    return entry.label == "InProgress" or entry.instance_status == "DeepHealthCheckInProgress"


def _silent(entry: NodeProgress) -> bool:
    return entry.label == entry.label_before


def _sentence(entry: NodeProgress) -> str:
    same = ", as it was before the check" if entry.label and _silent(entry) else ""
    return f"{entry.instance_id} is {entry.instance_status or 'gone'}, check {entry.label or 'not reported'}{same}"
