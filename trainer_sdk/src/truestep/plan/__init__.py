"""Which intervals a job needs: pure arithmetic on the standard library. Explained in docs/plan.md.

plan = make_plan(Workload(gpus=1024, step_seconds=5.0, hit_probability=0.1))
Schedule(audit_every=plan.audit_every, check_every=plan.check_every, checkpoint_every=500)
"""

from truestep.plan.errors import PlanError
from truestep.plan.latency import (
    detection_probability,
    expected_clean_steps,
    expected_corrupted_steps,
    expected_latency_steps,
    latency_exceeds,
    latency_quantile_steps,
)
from truestep.plan.planning import (
    FAULTS_PER_GPU_HOUR,
    HIT_PROBABILITIES,
    Plan,
    Workload,
    at_planned_interval,
    make_plan,
    sensitivity,
    waste_with_margin,
)
from truestep.plan.trust import (
    chosen_checkpoint_corruption_probability,
    corruption_probability,
    exact_margin_steps,
    expected_checkpoint_distance_steps,
    margin_steps,
    retention,
)
from truestep.plan.waste import Costs, Rollback, Waste, closed_form_audit_every, faults_per_step

__all__ = [
    "FAULTS_PER_GPU_HOUR",
    "HIT_PROBABILITIES",
    "Costs",
    "Plan",
    "PlanError",
    "Rollback",
    "Waste",
    "Workload",
    "at_planned_interval",
    "chosen_checkpoint_corruption_probability",
    "closed_form_audit_every",
    "corruption_probability",
    "detection_probability",
    "exact_margin_steps",
    "expected_checkpoint_distance_steps",
    "expected_clean_steps",
    "expected_corrupted_steps",
    "expected_latency_steps",
    "faults_per_step",
    "latency_exceeds",
    "latency_quantile_steps",
    "make_plan",
    "margin_steps",
    "retention",
    "sensitivity",
    "waste_with_margin",
]
