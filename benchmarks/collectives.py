"""The exchange that every step makes, beside Gloo's all-reduce of the same bytes: the wait of a rank, and its cost.

    python -m benchmarks.collectives --json benchmarks/results/collectives.json

Both in the same processes, in turns, where a training step makes them: the ranks have just averaged a gradient over
another group, and then computed for a while, so that they arrive almost at once. The wait counts from the arrival of
the last rank to the end of the last one. Processor time is that of all threads of a rank, Gloo's too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import machine, store
from benchmarks.workload import Workload, run_ranks
from truestep.collectives import CpuGroup

NUMBERS = 4
CALLS, WARM_UP = 300, 20
GRADIENT_ELEMENTS = 366_432
"""As many as the model of `benchmarks.overhead` has."""
UPDATE_SECONDS = 0.0015
OURS, THEIRS = "extremes (tree)", "all-reduce of Gloo"


def main() -> int:
    """Run the benchmark; print the table, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Workload.add_arguments(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 8], help="numbers of ranks")
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "numbers": NUMBERS, "calls": CALLS, "ranks": {}}
    print(f"{'ranks':>5}  {'':<26}{'median ms':>10}{'90% ms':>8}{'cpu ms a rank':>15}")
    for ranks in arguments.sizes:
        arguments.ranks = ranks
        rows = report["ranks"][str(ranks)] = _combined(run_ranks(_measure, Workload.of(arguments)))
        for name, row in rows.items():
            print(f"{ranks:>5}  {name:<26}{row['median_ms']:>10.2f}{row['p90_ms']:>8.2f}{row['cpu_ms']:>15.2f}")
    store(arguments.json, report)
    return 0


def _measure(_rank: int, _workload: Workload, _argument: None) -> dict[str, dict[str, Any]]:
    assert dist.group.WORLD is not None
    group = CpuGroup(dist.group.WORLD)
    numbers, gradient = torch.arange(2 * NUMBERS), torch.zeros(GRADIENT_ELEMENTS)
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: group.extremes(range(NUMBERS)),
        THEIRS: lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group.group),
    }
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    processor = dict.fromkeys(calls, 0.0)
    for number in range(WARM_UP + CALLS):
        for name, call in calls.items():
            dist.all_reduce(gradient)
            _compute(UPDATE_SECONDS)
            begin, used = time.perf_counter(), time.process_time()
            call()
            if number >= WARM_UP:
                spans[name].append((begin, time.perf_counter()))
                processor[name] += time.process_time() - used
    return {name: {"spans": spans[name], "processor": processor[name] / CALLS} for name in calls}


def _compute(seconds: float) -> None:
    square, end = torch.eye(128), time.perf_counter() + seconds
    while time.perf_counter() < end:
        square = square @ square


def _combined(per_rank: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    rows = {}
    for name in per_rank[0]:
        together = zip(*(rank[name]["spans"] for rank in per_rank), strict=True)
        waits = [max(end for _, end in spans) - max(begin for begin, _ in spans) for spans in together]
        rows[name] = {
            "median_ms": round(1000 * statistics.median(waits), 3),
            "p90_ms": round(1000 * statistics.quantiles(waits, n=10)[-1], 3),
            "cpu_ms": round(1000 * statistics.mean(rank[name]["processor"] for rank in per_rank), 3),
        }
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
