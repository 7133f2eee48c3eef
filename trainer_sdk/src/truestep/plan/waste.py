"""What audits and faults cost together, and the audit interval at which that is least.

Waste is extra time per useful time, so 0.01 means that a run of 100 days takes 101.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from truestep.plan.errors import require_count, require_positive, require_probability
from truestep.plan.latency import detection_probability, expected_corrupted_steps, expected_latency_steps
from truestep.plan.trust import expected_checkpoint_distance_steps, margin_steps

_SECONDS_PER_HOUR = 3600


class Rollback(StrEnum):
    """Back to where a recovery goes after an alarm, and so what a fault costs."""

    FIRST_ERROR = "first_error"
    """The newest checkpoint before the first wrong update: the mean, and the least that any recovery can lose."""
    MARGIN = "margin"
    """The newest checkpoint that is clean at the accepted risk: what truestep's recovery does, as it cannot see
    the first wrong update. It costs a quantile of the latency."""


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Shares of extra time at one interval. ``audit + check + lost`` is the whole."""

    audit_share: float
    """c/k: steps' worth of audits per step."""
    check_share: float
    """Steps' worth of weight comparisons per step."""
    lost_share: float
    """Work that is thrown away after an alarm and computed again, audits and comparisons of that work included.
    Infinite where faults come faster than work is regained."""
    lost_steps_per_fault: float
    """Mean steps that one fault throws away, the way back to a checkpoint included."""

    @property
    def total(self) -> float:
        return self.audit_share + self.check_share + self.lost_share


def faults_per_step(gpus: int, step_seconds: float, faults_per_gpu_hour: float) -> float:
    """lambda: expected onsets of faults in the whole job per step."""
    return gpus * faults_per_gpu_hour * step_seconds / _SECONDS_PER_HOUR


def closed_form_audit_every(audit_cost_steps: float, job_faults_per_step: float, hit_probability: float) -> float:
    """k* = sqrt(c / (lambda (1/d - 1/2))): minimises c/k + lambda k (1/d - 1/2), the published approximation.

    The same balance as Young's and Daly's for checkpoints (Young 1974, Daly 2006), with the audit as what costs and
    the detection latency as what is lost; Benoit, Cavelan, Robert and Sun (2014) treat verifications and checkpoints
    interleaved. At this k both terms are equal, so the waste is twice the audits' share. Raises `PlanError` for inputs
    out of range.
    """
    require_positive("audit cost", audit_cost_steps, "steps")
    require_positive("faults per step", job_faults_per_step, "faults per step of the whole job")
    d = detection_probability(hit_probability)
    return math.sqrt(audit_cost_steps / (job_faults_per_step * (1 / d - 0.5)))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the interval is chosen for. Raises `PlanError` for a field out of range."""

    job_faults_per_step: float
    hit_probability: float
    risk: float
    audit_cost_steps: float
    check_cost_steps: float
    checkpoint_every: int
    rollback: Rollback

    def __post_init__(self) -> None:
        require_positive("faults per step", self.job_faults_per_step, "faults per step of the whole job")
        require_probability("hit probability", self.hit_probability, one_allowed=True)
        require_probability("risk", self.risk, one_allowed=False)
        require_positive("audit cost", self.audit_cost_steps, "steps")
        require_positive("check cost", self.check_cost_steps, "steps", zero_allowed=True)
        require_count("checkpoint_every", self.checkpoint_every)

    def lost_steps(self, audit_every: int) -> float:
        """Mean steps that one fault throws away, up to and with the audit that finds it.

        FIRST_ERROR: `expected_corrupted_steps` + (C-1)/2, exact where the audits' and the checkpoints' intervals have
        no common divisor, within a step otherwise; published as k (1/d - 1/2) + C/2, which counts the steps before the
        first error as lost too and so finds no use in auditing every step. MARGIN: k + margin + the mean way from
        there back to a checkpoint, whatever the latency was.
        """
        if self.rollback is Rollback.FIRST_ERROR:
            return expected_corrupted_steps(audit_every, self.hit_probability) + (self.checkpoint_every - 1) / 2
        margin = margin_steps(audit_every, self.hit_probability, self.risk)
        return audit_every + margin + expected_checkpoint_distance_steps(margin, audit_every, self.checkpoint_every)

    def waste(self, audit_every: int, check_every: int) -> Waste:
        """(1 + c/k + c'/k') (1 + lambda E[L]) / (1 + lambda (E[L] - R)) - 1, R being `lost_steps`.

        Renewal-reward: between two faults the job computes 1/lambda steps until an onset and E[L] until its detection,
        and keeps all but R of them; audits and comparisons stretch every computed step. The published sum c/k +
        lambda (k (1/d - 1/2) + C/2) is its first order in lambda and 1/k, good to a tenth where the waste is below
        10%. A second fault before the first is found is left out, as is the time to restart.
        """
        latency = expected_latency_steps(audit_every, self.hit_probability)
        lost = self.lost_steps(audit_every)
        audit, check = self.audit_cost_steps / audit_every, self.check_cost_steps / check_every
        kept = 1 + self.job_faults_per_step * (latency - lost)
        repeated = (1 + audit + check) * self.job_faults_per_step * lost / kept if kept > 0 else math.inf
        return Waste(audit_share=audit, check_share=check, lost_share=repeated, lost_steps_per_fault=lost)

    def best_audit_every(self, check_every: int, max_audit_every: int) -> int:
        """The whole number in 1..`max_audit_every` at which `waste` is least; the smallest of equals.

        Searched within a factor of 2 around the closed form of this rollback, where waste is a quarter above its least
        value at either end; a long range in strides first. Then an audit of every step is compared: it lets no wrong
        update through, and so caps the waste near c however rarely a fault hits.
        """
        require_count("max_audit_every", max_audit_every)
        centre = min(max(self._closed_form(), 1.0), max_audit_every)
        low, high = max(1, int(centre / 2)), min(max_audit_every, math.ceil(centre * 2))
        best = low
        stride = max(1, (high - low) // _SEARCHED)
        while True:
            best = min(range(low, high + 1, stride), key=lambda k: (self.waste(k, check_every).total, k))
            if stride == 1:
                return min(1, best, key=lambda k: self.waste(k, check_every).total)
            low, high = max(low, best - stride), min(high, best + stride)
            stride = max(1, (high - low) // _SEARCHED)

    def _closed_form(self) -> float:
        """sqrt(c / (lambda a)), with a k what a fault costs: a = 1/d - 1/2, or 1 + ln(risk)/ln(1-d) with a margin."""
        mean = closed_form_audit_every(self.audit_cost_steps, self.job_faults_per_step, self.hit_probability)
        if self.rollback is Rollback.FIRST_ERROR:
            return mean
        d = detection_probability(self.hit_probability)
        per_interval = 1 + (margin_steps(_FINE, self.hit_probability, self.risk) / _FINE)
        return mean * math.sqrt((1 / d - 0.5) / per_interval)


_SEARCHED = 4096
"""Intervals tried a pass: all of them where the range is that short."""
_FINE = 10**6
"""An interval so long that rounding a margin up to whole steps does not show."""
