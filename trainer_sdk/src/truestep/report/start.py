"""One line when training starts: what is checked, how often, and what that is expected to cost."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from truestep.contract import NodeName, Rank
from truestep.contract.words import counted
from truestep.plan import Workload
from truestep.schedule import Schedule

_LOG = logging.getLogger("truestep")


def announce_start(rank: Rank, nodes: Mapping[Rank, NodeName], schedule: Schedule, coverage: str) -> None:
    """Say it, on rank 0."""
    if rank != 0:
        return
    say_at_start(start_text(nodes, schedule, coverage))


def say_at_start(text: str) -> None:
    """A line to the log, or on standard error where the program configures no logging at all."""
    if _LOG.hasHandlers():
        _LOG.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def start_text(nodes: Mapping[Rank, NodeName], schedule: Schedule, coverage: str) -> str:
    """The line. coverage: what audits of this run compare. The cost is an estimate, with the defaults of `plan`."""
    ranks, places = len(nodes), len(set(nodes.values()))
    audits, cost = _audits(schedule, coverage)
    parts = [
        "non-finite gradients every step",
        audits,
        f"weights every {schedule.check_every}",
        f"optimizer state before every save (every {schedule.checkpoint_every or schedule.check_every})",
    ]
    return f"truestep: watching {counted(ranks, 'rank')} on {counted(places, 'node')}: {', '.join(parts)}. {cost}"


def _audits(schedule: Schedule, coverage: str) -> tuple[str, str]:
    comparing = Workload.check_cost_steps / schedule.check_every
    every = schedule.audit_every
    if every is None:
        return coverage, f"Expected cost: {_percent(comparing)} of the time."
    one = "an audited step costs about one more step"
    if isinstance(every, int):
        share = Workload.audit_cost_steps / every
        return (
            f"audits of {coverage} every {every} steps",
            f"Expected cost: {_percent(share + comparing)} of the time; {one}.",
        )
    return f"audits of {coverage} on chosen steps", f"Expected cost: {_percent(comparing)} of the time, and {one}."


def _percent(share: float) -> str:
    return f"about {100 * share:.2g}%" if share < 0.5 else f"about {100 * share:.0f}%"
