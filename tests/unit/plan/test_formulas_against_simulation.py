"""Every formula of `truestep.plan` against the model played step by step. Seeded, so that a pass stays a pass.

Tolerance: 4 standard errors of the simulated figure; a right formula fails one seed in 16,000.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.unit.plan.simulation import Job, play, standard_error
from truestep.plan import (
    Costs,
    Rollback,
    chosen_checkpoint_corruption_probability,
    corruption_probability,
    detection_probability,
    expected_corrupted_steps,
    expected_latency_steps,
    latency_exceeds,
    latency_quantile_steps,
    margin_steps,
)

STANDARD_ERRORS = 4
TRIALS = 40_000
CASES = [(1, 0.3), (2, 0.2), (5, 1.0), (10, 0.3), (20, 0.05), (7, 0.6)]


@pytest.mark.parametrize(("audit_every", "p"), CASES)
def test_mean_latency_is_the_simulated_one(audit_every: int, p: float) -> None:
    latency = play(TRIALS, audit_every, p, seed=1).latency
    assert abs(latency.mean() - expected_latency_steps(audit_every, p)) <= STANDARD_ERRORS * standard_error(latency)


def test_the_simulation_is_precise_enough_to_tell_the_exact_mean_from_the_published_approximation() -> None:
    latency = play(TRIALS, 2, 0.2, seed=1).latency
    published = 2 * (1 / detection_probability(0.2) - 0.5)
    assert abs(latency.mean() - published) > 10 * standard_error(latency)


@pytest.mark.parametrize(("audit_every", "p"), CASES)
def test_mean_corrupted_steps_are_the_simulated_ones(audit_every: int, p: float) -> None:
    corrupted = play(TRIALS, audit_every, p, seed=2).corrupted
    # With an audit of every step, or a fault in every pass at k = 1, the sample does not vary at all.
    tolerance = STANDARD_ERRORS * standard_error(corrupted) + 1e-9
    assert abs(corrupted.mean() - expected_corrupted_steps(audit_every, p)) <= tolerance


@pytest.mark.parametrize(("audit_every", "p"), [(10, 0.3), (20, 0.05), (5, 1.0)])
@pytest.mark.parametrize("intervals", [0.0, 0.5, 1.0, 2.3])
def test_latency_exceeds_a_number_of_steps_as_often_as_simulated(audit_every: int, p: float, intervals: float) -> None:
    steps = int(intervals * audit_every)
    exact = latency_exceeds(steps, audit_every, p)
    share = (play(TRIALS, audit_every, p, seed=3).latency > steps).mean()
    assert abs(share - exact) <= STANDARD_ERRORS * math.sqrt(exact * (1 - exact) / TRIALS)


@pytest.mark.parametrize(("audit_every", "p"), [(10, 0.3), (20, 0.05)])
def test_latency_quantile_is_exceeded_as_often_as_the_risk_allows(audit_every: int, p: float) -> None:
    latency = play(TRIALS, audit_every, p, seed=4).latency
    steps = latency_quantile_steps(audit_every, p, 0.05)
    tolerance = STANDARD_ERRORS * math.sqrt(0.05 * 0.95 / TRIALS)
    assert (latency > steps).mean() <= 0.05 + tolerance
    assert (latency > steps - 1).mean() >= 0.05 - tolerance


@pytest.mark.parametrize(("audit_every", "p"), [(1, 0.3), (10, 0.3), (20, 0.05), (7, 0.6)])
@pytest.mark.parametrize("margin", [0, 3, 20, 33])
def test_state_before_a_margin_is_corrupt_as_often_as_simulated(audit_every: int, p: float, margin: int) -> None:
    fates = play(TRIALS, audit_every, p, seed=5)
    corrupt = (fates.first_error < fates.detected) & (fates.first_error <= fates.detected - audit_every - margin)
    exact = corruption_probability(margin, audit_every, p)
    assert abs(corrupt.mean() - exact) <= STANDARD_ERRORS * math.sqrt(exact * (1 - exact) / TRIALS)


@pytest.mark.parametrize("margin", [0, 17])
def test_chosen_checkpoint_is_corrupt_as_often_as_simulated(margin: int) -> None:
    audit_every, checkpoint_every, p = 12, 30, 0.1
    fates = play(TRIALS, audit_every, p, seed=6)
    # The audits' grid takes its places in the checkpoints' grid in turn.
    shift = np.random.default_rng(7).integers(0, checkpoint_every, TRIALS) * audit_every
    newest = fates.detected + shift - audit_every - margin
    checkpoint = newest - (newest + 1) % checkpoint_every
    first_error = fates.first_error + shift
    corrupt = (fates.first_error < fates.detected) & (first_error <= checkpoint)
    exact = chosen_checkpoint_corruption_probability(margin, audit_every, checkpoint_every, p)
    assert abs(corrupt.mean() - exact) <= STANDARD_ERRORS * math.sqrt(exact * (1 - exact) / TRIALS)


@pytest.mark.parametrize("rollback", list(Rollback))
@pytest.mark.parametrize(("audit_every", "checkpoint_every"), [(7, 5), (12, 12), (12, 30)])
def test_waste_is_that_of_a_simulated_run(rollback: Rollback, audit_every: int, checkpoint_every: int) -> None:
    p, risk, lam = 0.3, 0.1, 1e-3
    margin = margin_steps(audit_every, p, risk)
    job = Job(
        audit_every=audit_every,
        checkpoint_every=checkpoint_every,
        check_every=3,
        audit_cost=1.5,
        check_cost=0.1,
        hit_probability=p,
        faults_per_step=lam,
        margin=margin if rollback is Rollback.MARGIN else None,
    )
    economy = job.run(12_000, seed=8)
    costs = Costs(
        job_faults_per_step=lam,
        hit_probability=p,
        risk=risk,
        audit_cost_steps=1.5,
        check_cost_steps=0.1,
        checkpoint_every=checkpoint_every,
        rollback=rollback,
    )
    waste = costs.waste(audit_every, check_every=3)
    # Onsets follow a resume at most a little out of phase: less than a step a fault, as the docstring says.
    phase = lam * (waste.total + 1)
    assert abs(economy.waste - waste.total) <= STANDARD_ERRORS * economy.standard_error + phase
    assert economy.standard_error < 0.02 * waste.total
