"""Waste over the audit interval, one curve a hit probability, as SVG. Uses pygal where it is installed."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

from truestep.cli.errors import CommandError
from truestep.contract.words import counted
from truestep.plan import Plan, waste_with_margin

_POINTS_PER_CURVE = 60
_HIGHEST_WASTE = 1.0
"""Above 100% a curve ends: nobody chooses an interval there."""


def draw_waste(chosen: Plan, others: tuple[Plan, ...], path: Path) -> None:
    """Draw the waste with the recovery's margin over the interval, log-log. Raises `CommandError`."""
    try:
        pygal = importlib.import_module("pygal")
    except ImportError as error:
        raise CommandError(f"--plot needs {error.name}: pip install 'truestep[plot]', or leave --plot away") from error
    chart = pygal.XY(
        logarithmic=True,
        show_dots=False,
        x_title="audit every (steps)",
        y_title="extra time, % of useful time",
        title=f"{counted(chosen.workload.gpus, 'GPU')}, {chosen.workload.step_seconds:g} s a step: what audits and "
        "faults cost",
        js=[],
    )
    for plan in others:
        chart.add(f"p = {plan.workload.hit_probability:g}", _curve(plan))
    try:
        path.write_bytes(chart.render())
    except OSError as error:
        raise CommandError(
            f"cannot write {path}: {error.strerror}; give a file in a directory that exists and may be written to"
        ) from error


def _curve(plan: Plan) -> list[tuple[float, float]]:
    """(interval, percent) up to the workload's bound, evenly spaced on a logarithmic axis."""
    highest = math.log(plan.workload.max_audit_every)
    intervals = sorted({round(math.exp(highest * n / _POINTS_PER_CURVE)) for n in range(_POINTS_PER_CURVE + 1)})
    wastes = [(interval, waste_with_margin(plan, interval)) for interval in intervals]
    return [(interval, 100 * waste) for interval, waste in wastes if waste <= _HIGHEST_WASTE]
