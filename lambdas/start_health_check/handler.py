"""StartHealthCheck: HyperPod's own check of the suspects, as far as the policy lets it start before the approval."""

from __future__ import annotations

from lambdas.adapters.cluster_ports import batch_jobs_of, cluster_of, hyperpod_of
from lambdas.adapters.confirming import end_jobs
from lambdas.adapters.health_check import begin_check
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.confirmation import cut_short
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import HealthCheckStatus

STATE = "StartHealthCheck"


def act(work: Work) -> Answer:
    """Answers started, skipped or deferred. A check that was begun before is not begun again."""
    # Whatever became of the confirmation: the check, and later the relaunch, need its GPUs.
    left = "" if work.incident.dry_run else end_jobs(batch_jobs_of(work), work.incident)
    check = work.incident.health_check
    if check is None or check.status is HealthCheckStatus.DEFERRED:
        # The place of a check that waits for the approval is SettleHealthCheck, which verifies it.
        check = begin_check(work, cluster_of(work), hyperpod_of(work), approved=False)
    outcome = {
        HealthCheckStatus.SKIPPED: Outcome.SKIPPED,
        HealthCheckStatus.DEFERRED: Outcome.DEFERRED,
    }.get(check.status, Outcome.STARTED)
    reason = "; ".join(filter(None, (check.reason, left)))
    return work.answer(outcome, reason, incident=cut_short(work.incident).evolve(health_check=check))


handler = workflow_handler("start_health_check", STATE, act)
