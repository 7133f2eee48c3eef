"""``truestep plan``: a plan as tables, settings to copy, or JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

from truestep.cli.output import print_json, print_table, say, say_whole
from truestep.contract.words import counted
from truestep.plan import HIT_PROBABILITIES, Plan, Workload, at_planned_interval, make_plan, sensitivity

_HOURS_A_YEAR = 24 * 365.25


def show_plan(workload: Workload, *, as_json: bool, plot: Path | None) -> None:
    """Print the plan and its sensitivity to the hit probability; draw it where `plot` names a file."""
    chosen = make_plan(workload)
    others = sensitivity(workload, sorted({*HIT_PROBABILITIES, workload.hit_probability}, reverse=True))
    if plot is not None:
        from truestep.cli.plot import draw_waste

        draw_waste(chosen, others, plot)
    if as_json:
        print_json({"plan": chosen.to_json(), "sensitivity": [_sensitivity_row(chosen, other) for other in others]})
        return
    _print_plan(chosen)
    _print_settings(chosen)
    _print_sensitivity(chosen, others)
    for note in chosen.notes:
        say(f"Note: {note}.")
    if plot is not None:
        say(f"Drawn in {plot}.")


def _print_plan(plan: Plan) -> None:
    workload = plan.workload
    say(
        f"{counted(workload.gpus, 'GPU')}, steps of {workload.step_seconds:g} s: one fault in "
        f"{_hours(plan.hours_between_faults)} somewhere in the job. Assumed: a faulty GPU computes "
        f"{workload.hit_probability:g} of its passes wrong (p), and a risk of {workload.risk:g} is accepted."
    )
    say("")

    def row(name: str, steps: float, meaning: str) -> list[str]:
        return [name, f"{steps:,.0f}", _hours(steps * workload.step_seconds / 3600), meaning]

    audit = f"cost {_share(plan.waste.audit_share)}; finds {_share(plan.detection_probability)} of faults"
    rows = [
        row("audit every", plan.audit_every, audit),
        row("compare weights every", plan.check_every, f"cost {_share(plan.waste.check_share)}"),
        row("mean time to detection", plan.expected_latency_steps, "from the fault's onset"),
        row("longest at this risk", plan.latency_quantile_steps, f"exceeded in {_share(workload.risk)} of faults"),
        row("margin", plan.margin_steps, f"leaves a risk of {_share(plan.corruption_probability)}"),
        ["keep checkpoints", f"{plan.keep:,}", "", f"one every {workload.checkpoint_every:,} steps"],
    ]
    print_table("", [("", "left"), ("steps", "right"), ("time", "right"), ("", "left")], rows)
    say("")
    say(
        f"Waste: {_share(plan.waste.total)} of useful time if the recovery knew the first wrong update, "
        f"{_share(plan.waste_with_margin.total)} with the margin that it takes instead."
    )
    say(
        f"Without the margin the checkpoint would be corrupt in {_share(plan.corruption_probability_without_margin)} "
        "of recoveries."
    )
    say("")


def _print_settings(plan: Plan) -> None:
    schedule = (
        f"audit_every={plan.audit_every}, check_every={plan.check_every}, "
        f"checkpoint_every={plan.workload.checkpoint_every}"
    )
    say("In the training script:")
    say_whole(f"  Schedule({schedule})")
    say_whole(f"  VerifiedCheckpoints(..., keep={plan.keep})")
    say("In the recovery's policy:")
    say_whole(",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in plan.recovery_policy.items()))
    say("")


def _print_sensitivity(plan: Plan, others: tuple[Plan, ...]) -> None:
    rows = []
    for other in others:
        as_planned = at_planned_interval(plan, other.workload.hit_probability)[1]
        marker = " *" if other.workload.hit_probability == plan.workload.hit_probability else ""
        rows.append(
            [
                f"{other.workload.hit_probability:g}{marker}",
                f"{other.audit_every:,}",
                f"{other.keep:,}",
                f"{other.expected_latency_steps:,.0f}",
                f"{other.margin_steps:,}",
                _share(other.waste.total),
                _share(other.waste_with_margin.total),
                _share(as_planned.total),
            ]
        )
    headings = ["p", "audit every", "keep", "detection", "margin", "waste", "with margin", f"at {plan.audit_every:,}"]
    print_table(
        "If a faulty GPU hits with another probability p (* assumed above):",
        [(heading, "right") for heading in headings],
        rows,
    )
    say(f"at {plan.audit_every:,}: the waste with the margin if this interval is kept and p is that of the row.")


def _sensitivity_row(plan: Plan, other: Plan) -> dict[str, object]:
    """What the table shows of one hit probability, with field names."""
    first_error, margin = at_planned_interval(plan, other.workload.hit_probability)
    return {
        "hit_probability": other.workload.hit_probability,
        "audit_every": other.audit_every,
        "check_every": other.check_every,
        "keep": other.keep,
        "expected_latency_steps": other.expected_latency_steps,
        "margin_steps": other.margin_steps,
        "waste": other.waste.total,
        "waste_with_margin": other.waste_with_margin.total,
        "waste_at_planned_interval": first_error.total,
        "waste_with_margin_at_planned_interval": margin.total,
    }


def _share(share: float) -> str:
    if math.isinf(share):
        return "no end"
    percent = 100 * share
    if percent == 0 or percent >= 9.95:
        return f"{percent:,.0f}%"
    return f"{percent:.2g}%" if percent >= 0.01 else "<0.01%"


def _hours(hours: float) -> str:
    if hours >= 2 * _HOURS_A_YEAR:
        return f"{hours / _HOURS_A_YEAR:,.0f} years"
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    if hours >= 2:
        return f"{hours:.0f} h"
    minutes = hours * 60
    return f"{minutes:.0f} min" if minutes >= 2 else f"{minutes * 60:.2g} s"
