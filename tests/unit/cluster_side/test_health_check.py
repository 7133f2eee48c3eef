"""When HyperPod's health check starts, and what its end means: words, never an acquittal."""

from __future__ import annotations

import pytest

from lambdas.domain.cluster_health_check import NodeProgress, decide_check, settle_check
from lambdas.domain.policy import HealthCheckWhen, Policy
from lambdas.domain.records import HealthCheckStatus

STARTED, SKIPPED, DEFERRED = HealthCheckStatus.STARTED, HealthCheckStatus.SKIPPED, HealthCheckStatus.DEFERRED


def decide(
    when: HealthCheckWhen = HealthCheckWhen.BEFORE_APPROVAL,
    *,
    automatic: bool = False,
    approved: bool = False,
    allowed: bool = False,
    dry_run: bool = False,
    ids: tuple[str, ...] = ("i-1",),
) -> HealthCheckStatus:
    policy = Policy(health_check=when, allow_automatic_replacement=allowed)
    return decide_check(
        policy, automatic_recovery=automatic, approved=approved, dry_run=dry_run, instance_ids=ids
    ).status


def test_before_the_approval_it_starts_where_it_can_replace_nothing() -> None:
    assert decide() is STARTED


def test_automatic_recovery_puts_it_off_until_the_approval_unless_allowed() -> None:
    assert decide(automatic=True) is DEFERRED
    assert decide(automatic=True, approved=True) is STARTED
    assert decide(automatic=True, allowed=True) is STARTED


def test_the_policy_can_put_it_off_or_skip_it() -> None:
    assert decide(HealthCheckWhen.AFTER_APPROVAL) is DEFERRED
    assert decide(HealthCheckWhen.AFTER_APPROVAL, approved=True) is STARTED
    assert decide(HealthCheckWhen.SKIP, approved=True) is SKIPPED


def test_a_dry_run_and_an_empty_list_start_nothing() -> None:
    assert decide(dry_run=True) is SKIPPED
    assert decide(ids=()) is SKIPPED


def progress(status: str = "Running", label: str = "", before: str = "") -> NodeProgress:
    return NodeProgress(instance_id="i-1", instance_status=status, label=label, label_before=before)


def settle(*seen: NodeProgress, seconds: float = 100, limit: float = 1000) -> tuple[HealthCheckStatus | None, str]:
    settlement = settle_check(seen, running_seconds=seconds, limit_seconds=limit)
    return settlement.status, settlement.reason


@pytest.mark.parametrize("seen", [progress(label="InProgress"), progress(status="DeepHealthCheckInProgress")])
def test_it_runs_until_it_ends_or_the_limit_comes(seen: NodeProgress) -> None:
    assert settle(seen)[0] is None
    status, reason = settle(seen, seconds=1000)
    assert status is HealthCheckStatus.UNKNOWN
    assert "not waited for any longer" in reason


def test_a_pass_is_recorded_as_clearing_nobody() -> None:
    status, reason = settle(progress(label="Passed", before="InProgress"))
    assert status is HealthCheckStatus.PASSED
    assert "clears nobody" in reason


def test_a_label_of_an_earlier_check_is_waited_out_and_then_said() -> None:
    old = progress(label="Passed", before="Passed")
    assert settle(old, seconds=5)[0] is None
    status, reason = settle(old, seconds=60)
    assert status is HealthCheckStatus.PASSED
    assert "as it was before the check" in reason


def test_one_failure_among_several_is_a_failure() -> None:
    assert settle(progress(label="Passed"), progress(label="Failed"))[0] is HealthCheckStatus.FAILED


def test_a_node_that_never_reported_was_skipped() -> None:
    assert settle(progress())[0] is HealthCheckStatus.SKIPPED


def test_an_instance_that_vanished_leaves_the_result_unknown() -> None:
    status, reason = settle(progress(status=""), progress(label="Passed"))
    assert status is HealthCheckStatus.UNKNOWN
    assert "left the cluster" in reason
