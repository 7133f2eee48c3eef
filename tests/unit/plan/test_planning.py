"""Published figures, bounds, and the arithmetic's invariants."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.plan import (
    Costs,
    PlanError,
    Rollback,
    Workload,
    at_planned_interval,
    chosen_checkpoint_corruption_probability,
    closed_form_audit_every,
    corruption_probability,
    detection_probability,
    exact_margin_steps,
    expected_checkpoint_distance_steps,
    expected_corrupted_steps,
    expected_latency_steps,
    latency_exceeds,
    latency_quantile_steps,
    make_plan,
    margin_steps,
    retention,
    sensitivity,
)

BIG_JOB = Workload(gpus=1024, step_seconds=5.0, hit_probability=1.0, check_cost_steps=0.0)


def hit_probability_of(d: float) -> float:
    return 1 - math.sqrt(1 - d)


@pytest.mark.parametrize(
    ("d", "audit_every", "waste"),
    [(1.0, 1650, 0.0012), (0.01, 117, 0.017), (1e-4, 12, 0.17)],
)
def test_published_example_of_1024_gpus_is_reproduced(d: float, audit_every: int, waste: float) -> None:
    plan = make_plan(dataclasses.replace(BIG_JOB, hit_probability=hit_probability_of(d), checkpoint_every=1))
    assert plan.audit_every == pytest.approx(audit_every, rel=0.015, abs=0.5)
    assert plan.waste.total == pytest.approx(waste, rel=0.06)
    assert plan.waste.audit_share == pytest.approx(plan.waste.total / 2, rel=0.2)


@pytest.mark.parametrize(("p", "corrupt"), [(1.0, 0.0), (0.3, 0.18), (0.1, 0.55), (0.01, 0.93)])
def test_simulated_shares_of_corrupt_checkpoints_without_a_margin_are_reproduced(p: float, corrupt: float) -> None:
    assert chosen_checkpoint_corruption_probability(0, 100, 500, p) == pytest.approx(corrupt, abs=0.01)


@pytest.mark.parametrize(("p", "margin"), [(1.0, 0), (0.3, 420), (0.1, 1422), (0.01, 14904)])
def test_margins_in_use_are_reproduced(p: float, margin: int) -> None:
    assert margin_steps(100, p, 0.05) == margin


def test_published_sum_is_close_where_waste_is_small_and_wrong_where_every_step_is_audited() -> None:
    lam = BIG_JOB.job_faults_per_step
    plan = make_plan(dataclasses.replace(BIG_JOB, hit_probability=0.001))
    k, c = plan.audit_every, plan.workload.checkpoint_every
    published = 1 / k + lam * (k * (1 / detection_probability(0.001) - 0.5) + c / 2)
    assert plan.waste.total == pytest.approx(published, rel=0.1)
    rare = make_plan(dataclasses.replace(BIG_JOB, hit_probability=1e-8))
    assert rare.audit_every == 1
    assert rare.waste.total == pytest.approx(1.0, rel=0.01)
    assert rare.waste_with_margin.total == pytest.approx(1.0, rel=0.01)
    assert lam * expected_latency_steps(1, 1e-8) > 30


probabilities = st.floats(min_value=1e-6, max_value=1.0)
risks = st.floats(min_value=1e-6, max_value=0.9)
intervals = st.integers(min_value=1, max_value=5000)


@given(intervals, probabilities, risks)
def test_exact_margin_keeps_the_risk_and_one_step_less_does_not(k: int, p: float, risk: float) -> None:
    exact = exact_margin_steps(k, p, risk)
    assert exact <= margin_steps(k, p, risk)
    assert corruption_probability(exact, k, p) <= risk
    if exact > 0:
        assert corruption_probability(exact - 1, k, p) > risk


@given(intervals, probabilities, risks)
def test_latency_quantile_is_the_least_that_keeps_the_risk(k: int, p: float, risk: float) -> None:
    steps = latency_quantile_steps(k, p, risk)
    assert latency_exceeds(steps, k, p) <= risk
    if steps > 0:
        assert latency_exceeds(steps - 1, k, p) > risk * (1 - 1e-9)


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 60))
def test_checkpoint_distance_and_retention_are_what_enumeration_finds(margin: int, k: int, c: int) -> None:
    start = 100 * k * c
    distances, kept = [], []
    for audit in range(start + k - 1, start + k - 1 + math.lcm(k, c), k):
        newest = audit - k - margin
        checkpoint = next(s for s in range(newest, newest - c, -1) if (s + 1) % c == 0)
        distances.append(newest - checkpoint)
        kept.append(sum((s + 1) % c == 0 for s in range(checkpoint, audit)))
    assert expected_checkpoint_distance_steps(margin, k, c) == pytest.approx(sum(distances) / len(distances))
    assert max(kept) <= retention(margin, k, c) <= max(kept) + 1


@settings(max_examples=30)
@given(
    st.floats(1e-6, 1e-3),
    st.floats(0.02, 1.0),
    st.floats(0.1, 3.0),
    st.sampled_from([1, 50, 100, 128]),
    st.sampled_from(list(Rollback)),
)
def test_no_interval_up_to_the_bound_wastes_less(lam: float, p: float, c: float, every: int, back: Rollback) -> None:
    costs = Costs(
        job_faults_per_step=lam,
        hit_probability=p,
        risk=0.05,
        audit_cost_steps=c,
        check_cost_steps=0.01,
        checkpoint_every=every,
        rollback=back,
    )
    best = costs.best_audit_every(10, max_audit_every=3000)
    least = min(costs.waste(k, 10).total for k in range(1, 3001))
    assert costs.waste(best, 10).total == pytest.approx(least, rel=1e-12)


def test_optimising_for_the_margin_audits_more_often_and_wastes_less_with_it() -> None:
    usual = make_plan(dataclasses.replace(BIG_JOB, hit_probability=0.1))
    careful = make_plan(dataclasses.replace(BIG_JOB, hit_probability=0.1, rollback=Rollback.MARGIN))
    assert careful.audit_every < usual.audit_every
    assert careful.waste_with_margin.total < usual.waste_with_margin.total
    assert careful.waste.total > usual.waste.total


def test_interval_of_a_small_job_is_held_at_its_bound_and_the_plan_says_so() -> None:
    plan = make_plan(Workload(gpus=8, step_seconds=0.5, hit_probability=1.0, max_audit_every=2000))
    assert plan.audit_every == 2000
    assert plan.audit_every_closed_form > 2000
    assert any("upper bound of 2,000" in note for note in plan.notes)


def test_risk_is_kept_by_the_margin_and_broken_without_it() -> None:
    plan = make_plan(dataclasses.replace(BIG_JOB, hit_probability=0.1))
    assert plan.corruption_probability <= plan.workload.risk < plan.corruption_probability_without_margin


def test_weights_are_never_compared_more_seldom_than_audited_or_saved() -> None:
    costly = dataclasses.replace(BIG_JOB, check_cost_steps=50.0, hit_probability=0.001, checkpoint_every=40)
    plan = make_plan(costly)
    assert plan.check_every <= min(plan.audit_every, 40)


def test_rarer_hits_mean_more_audits_more_checkpoints_and_more_waste() -> None:
    plans = sensitivity(BIG_JOB)
    pairs = list(itertools.pairwise(plans))
    assert all(rarer.audit_every < usual.audit_every for usual, rarer in pairs)
    assert all(rarer.keep > usual.keep for usual, rarer in pairs)
    assert all(rarer.waste.total > usual.waste.total for usual, rarer in pairs)


def test_a_plan_for_another_hit_probability_than_the_true_one_wastes_more_than_the_right_plan() -> None:
    plan = make_plan(BIG_JOB)
    right = make_plan(dataclasses.replace(BIG_JOB, hit_probability=0.01))
    first_error, margin = at_planned_interval(plan, 0.01)
    assert first_error.total > right.waste.total
    assert margin.total > right.waste_with_margin.total


def test_faults_faster_than_recovery_waste_without_end_and_the_plan_says_so() -> None:
    plan = make_plan(Workload(gpus=1024, step_seconds=5, hit_probability=0.001, risk=1e-6, faults_per_gpu_hour=1e-4))
    assert math.isinf(plan.waste_with_margin.total)
    assert any("throw away more than the job computes" in note for note in plan.notes)
    assert json.loads(json.dumps(plan.to_json(), allow_nan=False))["waste_with_margin"]["total"] == "inf"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gpus", 0, "whole number of at least 1"),
        ("gpus", 2.5, "whole number of at least 1"),
        ("gpus", True, "whole number of at least 1"),
        ("step_seconds", 0.0, "in seconds"),
        ("step_seconds", math.nan, "in seconds"),
        ("step_seconds", math.inf, "in seconds"),
        ("hit_probability", 0.0, "above 0 and at most 1"),
        ("hit_probability", 1.5, "above 0 and at most 1"),
        ("risk", 1.0, "both excluded"),
        ("audit_cost_steps", -1.0, "above 0, in steps"),
        ("check_cost_steps", -0.1, "at least 0, in steps"),
        ("checkpoint_every", 0, "whole number of at least 1"),
        ("faults_per_gpu_hour", 0.0, "faults per GPU-hour"),
        ("faults_per_gpu_hour", 100.0, "check faults_per_gpu_hour"),
        ("max_audit_every", 0, "whole number of at least 1"),
        ("rollback", "mean", "give one of first_error, margin"),
    ],
)
def test_input_out_of_range_is_refused_by_name_with_its_range(field: str, value: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        dataclasses.replace(BIG_JOB, **{field: value})
    assert field in str(caught.value)


@settings(max_examples=60)
@given(
    st.integers(1, 10**6),
    st.floats(1e-3, 1e3),
    st.floats(1e-12, 1.0),
    st.floats(1e-3, 1e3),
    st.integers(1, 10**7),
    st.floats(1e-9, 0.99),
    st.sampled_from(list(Rollback)),
)
def test_every_workload_in_range_gets_a_plan_within_its_bounds_and_risk(
    gpus: int, seconds: float, p: float, cost: float, checkpoint_every: int, risk: float, rollback: Rollback
) -> None:
    workload = Workload(
        gpus=gpus,
        step_seconds=seconds,
        hit_probability=p,
        audit_cost_steps=cost,
        checkpoint_every=checkpoint_every,
        risk=risk,
        rollback=rollback,
        faults_per_gpu_hour=1e-7,
    )
    plan = make_plan(workload)
    assert 1 <= plan.check_every <= plan.audit_every <= workload.max_audit_every
    assert plan.exact_margin_steps <= plan.margin_steps
    assert plan.corruption_probability <= risk + 1e-9
    assert 1 <= plan.expected_corrupted_steps <= plan.expected_latency_steps * (1 + 1e-9)
    json.dumps(plan.to_json(), allow_nan=False)


def test_a_fault_that_hits_almost_never_costs_one_step_if_every_step_is_audited() -> None:
    assert expected_corrupted_steps(1, 1e-12) == 1.0


def test_many_places_of_checkpoints_are_bounded_from_above_and_closely() -> None:
    audit_every, checkpoint_every, p = 97, 20_011, 0.02
    places = [corruption_probability(distance, audit_every, p) for distance in range(checkpoint_every)]
    exact = math.fsum(places) / len(places)
    assert exact <= chosen_checkpoint_corruption_probability(0, audit_every, checkpoint_every, p) <= exact + 1 / 4096


def test_closed_form_is_the_published_one() -> None:
    d = detection_probability(0.01)
    assert closed_form_audit_every(2.0, 1e-6, 0.01) == pytest.approx(math.sqrt(2.0 / (1e-6 * (1 / d - 0.5))))


def test_planning_imports_the_standard_library_only() -> None:
    code = (
        "import sys, truestep.plan; "
        "print(*sorted(n for n in ('torch', 'numpy', 'boto3', 'typer', 'rich') if n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.split() == []
