"""From a job to the intervals of its checks, the checkpoints to keep, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from truestep.contract.codec import to_json
from truestep.plan.errors import PlanError, require_count, require_positive, require_probability
from truestep.plan.latency import (
    detection_probability,
    expected_corrupted_steps,
    expected_latency_steps,
    latency_quantile_steps,
)
from truestep.plan.trust import (
    chosen_checkpoint_corruption_probability,
    exact_margin_steps,
    margin_steps,
    retention,
)
from truestep.plan.waste import Costs, Rollback, Waste, closed_form_audit_every, faults_per_step

FAULTS_PER_GPU_HOUR = 1 / 1.9e6
"""18 incidents in 35 million GPU-hours (AEGIS, OSDI 2026)."""
HIT_PROBABILITIES = (1.0, 0.3, 0.1, 0.01, 0.001, 0.0001)
"""Rows of a sensitivity table. Replays of real faulty GPUs failed at rates from all down to one in 10^8 (SDCHunter,
OSDI 2026)."""
_LARGE_WASTE = 0.1
_MOST = 10**9
_LEAST_PROBABILITY = 1e-12
_LEAST_FAULTS = 1e-18
"""One fault in a billion years of steps of a tenth of a second, and about where the formulas run out of digits."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job and what is assumed of its faults. Raises `PlanError` naming the field that is out of range."""

    gpus: int
    step_seconds: float
    """One optimizer step without an audit."""
    hit_probability: float = 0.1
    """p: a faulty GPU corrupts a pass with this probability. No figure is safe: see the sensitivity table."""
    audit_cost_steps: float = 1.0
    """c: an audit repeats a step's forward and backward, with deterministic kernels; 1 was measured with 10% of time
    at an audit every 10 steps on 32 H100."""
    check_cost_steps: float = 0.002
    """A weight comparison: one pass over the weights, 10 ms of a 5 s step for 16 GB at 1.6 TB/s."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    risk: float = 0.05
    """alpha: accepted probability that the checkpoint resumed from is corrupt all the same."""
    faults_per_gpu_hour: float = FAULTS_PER_GPU_HOUR
    max_audit_every: int = 10_000
    """Upper bound of the interval, whatever the costs: no checkpoint becomes trusted between two audits."""
    rollback: Rollback = Rollback.FIRST_ERROR
    """What the interval is optimised for."""

    def __post_init__(self) -> None:
        require_count("gpus", self.gpus)
        require_positive("step_seconds", self.step_seconds, "seconds")
        require_probability("hit_probability", self.hit_probability, one_allowed=True)
        require_positive("audit_cost_steps", self.audit_cost_steps, "steps")
        require_positive("check_cost_steps", self.check_cost_steps, "steps", zero_allowed=True)
        require_count("checkpoint_every", self.checkpoint_every)
        require_probability("risk", self.risk, one_allowed=False)
        require_positive("faults_per_gpu_hour", self.faults_per_gpu_hour, "faults per GPU-hour")
        require_count("max_audit_every", self.max_audit_every)
        if not isinstance(self.rollback, Rollback):
            raise PlanError(f"rollback is {self.rollback!r}; give one of {', '.join(Rollback)}")
        for name in ("gpus", "checkpoint_every", "max_audit_every"):
            if getattr(self, name) > _MOST:
                raise PlanError(f"{name} is above {_MOST:,}; give a whole number of at least 1, and at most that")
        if self.hit_probability < _LEAST_PROBABILITY:
            raise PlanError(
                f"hit_probability is {self.hit_probability!r}; give at least {_LEAST_PROBABILITY:g}: a rarer fault "
                "hits no training that ends, and no audit would find it"
            )
        if not _LEAST_FAULTS <= self.job_faults_per_step < 1:
            raise PlanError(
                f"these inputs mean {self.job_faults_per_step:.3g} faults per step of the job; "
                "check faults_per_gpu_hour (about 5e-7) and step_seconds"
            )

    @property
    def job_faults_per_step(self) -> float:
        """lambda."""
        return faults_per_step(self.gpus, self.step_seconds, self.faults_per_gpu_hour)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Intervals for a workload, and what to expect of them. Steps are optimizer steps."""

    workload: Workload
    audit_every: int
    """``Schedule.audit_every``; the recovery's policy takes it as ``audit_interval_steps``."""
    audit_every_closed_form: float
    """k* of the published formula, before whole numbers, bounds and the exact expression."""
    check_every: int
    """``Schedule.check_every``."""
    keep: int
    """``VerifiedCheckpoints(keep=...)``: newest checkpoints among which a clean one always is, at the risk."""
    detection_probability: float
    """d(p), of one audit."""
    job_faults_per_step: float
    hours_between_faults: float
    """Of the whole job."""
    expected_latency_steps: float
    """From a fault's onset through the audit that finds it."""
    latency_quantile_steps: int
    """Exceeded with probability at most the risk."""
    expected_corrupted_steps: float
    """From the first wrong update through detection."""
    margin_steps: int
    """What the recovery takes off the newest clean step before it chooses a checkpoint."""
    exact_margin_steps: int
    """The least margin that would do."""
    corruption_probability: float
    """That the checkpoint chosen with `margin_steps` is corrupt; at most the risk."""
    corruption_probability_without_margin: float
    waste: Waste
    """With a recovery back to the first wrong update."""
    waste_with_margin: Waste
    """With the recovery's margin."""
    notes: tuple[str, ...] = ()
    """What a person should know before following the plan."""

    @property
    def recovery_policy(self) -> dict[str, float]:
        """Fields of the recovery's policy, so that it takes this margin. Where every step is audited no update is
        applied unseen, whatever p: the policy says that as p = 1."""
        p = 1.0 if self.audit_every == 1 else self.workload.hit_probability
        return {
            "audit_interval_steps": self.audit_every,
            "assumed_hit_probability": p,
            "risk": self.workload.risk,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; infinite shares are the string ``inf``, totals included."""
        document: dict[str, Any] = to_json(self)
        document["recovery_policy"] = self.recovery_policy
        document["waste"]["total"] = to_json(self.waste.total)
        document["waste_with_margin"]["total"] = to_json(self.waste_with_margin.total)
        return document


def make_plan(workload: Workload) -> Plan:
    """The intervals with the least waste for `workload`. Pure; takes milliseconds."""
    p, risk = workload.hit_probability, workload.risk
    costs = _costs(workload, workload.rollback)
    check_every = best_check_every(workload)
    k = costs.best_audit_every(check_every, workload.max_audit_every)
    check_every = min(check_every, k)
    margin = margin_steps(k, p, risk)
    plan = Plan(
        workload=workload,
        audit_every=k,
        audit_every_closed_form=closed_form_audit_every(workload.audit_cost_steps, costs.job_faults_per_step, p),
        check_every=check_every,
        keep=retention(margin, k, workload.checkpoint_every),
        detection_probability=detection_probability(p),
        job_faults_per_step=costs.job_faults_per_step,
        hours_between_faults=1 / (workload.gpus * workload.faults_per_gpu_hour),
        expected_latency_steps=expected_latency_steps(k, p),
        latency_quantile_steps=latency_quantile_steps(k, p, risk),
        expected_corrupted_steps=expected_corrupted_steps(k, p),
        margin_steps=margin,
        exact_margin_steps=exact_margin_steps(k, p, risk),
        corruption_probability=chosen_checkpoint_corruption_probability(margin, k, workload.checkpoint_every, p),
        corruption_probability_without_margin=chosen_checkpoint_corruption_probability(
            0, k, workload.checkpoint_every, p
        ),
        waste=_costs(workload, Rollback.FIRST_ERROR).waste(k, check_every),
        waste_with_margin=_costs(workload, Rollback.MARGIN).waste(k, check_every),
    )
    return dataclasses.replace(plan, notes=tuple(_notes(plan)))


def sensitivity(workload: Workload, hit_probabilities: Iterable[float] = HIT_PROBABILITIES) -> tuple[Plan, ...]:
    """The plan at each hit probability, all else as in `workload`: what to do, and what it costs, if p is that."""
    return tuple(make_plan(dataclasses.replace(workload, hit_probability=p)) for p in hit_probabilities)


def at_planned_interval(plan: Plan, hit_probability: float) -> tuple[Waste, Waste]:
    """(back to the first error, with the margin): the waste of the plan's intervals if p is another than assumed."""
    workload = dataclasses.replace(plan.workload, hit_probability=hit_probability)
    first_error, margin = (
        _costs(workload, rollback).waste(plan.audit_every, plan.check_every)
        for rollback in (Rollback.FIRST_ERROR, Rollback.MARGIN)
    )
    return first_error, margin


def waste_with_margin(plan: Plan, audit_every: int) -> float:
    """Total waste at another audit interval, with the recovery's margin and all else as in the plan."""
    return _costs(plan.workload, Rollback.MARGIN).waste(audit_every, min(plan.check_every, audit_every)).total


def best_check_every(workload: Workload) -> int:
    """sqrt(2 c' / lambda), within 1..`checkpoint_every` and `max_audit_every`: the least waste of weight comparisons.

    A differing weight stays different, so the next comparison finds it: the closed form of audits at d = 1. All of
    lambda is taken as faults of this kind, since no share is published: too often rather than too seldom. Weights are
    compared before every checkpoint anyway.
    """
    best = math.sqrt(2 * workload.check_cost_steps / workload.job_faults_per_step)
    return max(1, min(round(best), workload.checkpoint_every, workload.max_audit_every))


def _costs(workload: Workload, rollback: Rollback) -> Costs:
    return Costs(
        job_faults_per_step=workload.job_faults_per_step,
        hit_probability=workload.hit_probability,
        risk=workload.risk,
        audit_cost_steps=workload.audit_cost_steps,
        check_cost_steps=workload.check_cost_steps,
        checkpoint_every=workload.checkpoint_every,
        rollback=rollback,
    )


def _notes(plan: Plan) -> Iterable[str]:
    workload = plan.workload
    if plan.audit_every == workload.max_audit_every and plan.audit_every_closed_form > workload.max_audit_every:
        yield (
            f"the audit interval is held at its upper bound of {workload.max_audit_every:,} steps; the costs alone "
            f"would allow {plan.audit_every_closed_form:,.0f}"
        )
    if plan.audit_every == 1:
        yield "every step is audited before its update is applied: no wrong update passes, and no margin is needed"
    if math.isinf(plan.waste_with_margin.total):
        yield (
            "with the margin the recovery would throw away more than the job computes between two faults: at this hit "
            "probability audits cannot keep the run clean at this risk"
        )
    elif plan.waste_with_margin.total > _LARGE_WASTE:
        yield f"with the margin faults and checks cost {plan.waste_with_margin.total:,.0%} of useful time"
    if workload.gpus < 3:
        yield "naming the faulty GPU takes three nodes; with fewer, faults are found but nobody can be named"
