"""What the checks cost: plain DDP against guarded steps, in the same processes, interleaved.

    python -m benchmarks.overhead --rounds 40 --json benchmarks/results/overhead.json
    python -m benchmarks.overhead --rounds 40 --autocast --json benchmarks/results/overhead-bfloat16.json

Each round runs a few steps of every mode in a shuffled order, so that a noisy machine disturbs all alike and a mode
finds in the caches what its own last step left there, as in a training; a ratio is taken within a round, and the
median over rounds is reported: of wall-clock time, and of processor time of all ranks together. A busy machine moves
both by more than the checks cost, so these are also timed directly, by the processor time of the calls themselves;
the parts of an audited step likewise. The C allocator is told to keep what is freed, as PyTorch's own allocator does
on a GPU: else a replay pays for 11,000 page faults, a tenth of its time, that a repeated pass does not have. With
--autocast and sdcguard installed (dependency group `comparison`) its checks are measured in the same rounds; it
checks products of bfloat16 and float16 only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.audit_parts import AUDIT_PARTS, PARTS, parts_timed
from benchmarks.record import machine, store
from benchmarks.workload import Workload, run_ranks
from truestep import Guard, Schedule, attach
from truestep.checks import buckets

PLAIN = "plain DDP"
ALONE = "forward and backward alone"
ALWAYS_ON = "non-finite and reduction word"
WEIGHTS = "... and weights, every step"
SAVING = "... and optimizer state"
AUDIT = "ring replay audit"
EVERYTHING = "every check in one step"
NEVER = 1 << 30
WARM_UP_ROUNDS = 3
KEPT_BYTES = str(1 << 30)
TARGETS = {"always_on_ratio": 1.02, "audit_in_passes": 1.15}

Step = Callable[[], float | None]
"""Returns the processor seconds of the checks' own calls where it knows them."""


def guarded_steps(rank: int, workload: Workload) -> dict[str, Step]:
    """Mode -> one step of it; each has a model of its own, as what a guard hangs on its model slows other guards' steps
    too. Collective."""
    batch = workload.batch(rank)

    def mode(**periods: int | None) -> Step:
        model, optimizer = workload.trainee()
        attach(model)
        schedule = Schedule(**{"audit_every": None, "check_every": NEVER, "checkpoint_every": NEVER, **periods})  # type: ignore[arg-type]
        guard = Guard(model, optimizer, schedule, compute_loss=workload.loss, checkpoints=lambda _step: None)
        numbers = itertools.count()

        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            start = time.thread_time()
            guard.start_step(next(numbers), batch)
            spent = time.thread_time() - start
            loss = workload.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            start = time.thread_time()
            guard.before_update(loss)
            spent += time.thread_time() - start
            optimizer.step()
            start = time.thread_time()
            guard.after_update()
            return spent + time.thread_time() - start

        return step

    return {
        ALWAYS_ON: mode(),
        WEIGHTS: mode(check_every=1),
        SAVING: mode(check_every=1, checkpoint_every=1),
        AUDIT: mode(audit_every=1),
        EVERYTHING: mode(audit_every=1, check_every=1, checkpoint_every=1),
    }


def plain_steps(rank: int, workload: Workload) -> dict[str, Step]:
    """A DDP model that no hook touches, and a pass of the bare module."""
    model, optimizer = workload.trainee()
    bare, batch = workload.module(), workload.batch(rank)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def forward_and_backward() -> None:
        bare.zero_grad(set_to_none=True)
        workload.loss(bare, batch).backward()  # type: ignore[no-untyped-call]

    return {PLAIN: step, ALONE: forward_and_backward}


@contextmanager
def hook_timed() -> Iterator[list[float]]:
    """Processor seconds of each pass of the communication hook over a bucket, in whatever thread, as they happen."""
    spent: list[float] = []

    def timed(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def call(buffer: torch.Tensor) -> Any:
            start = time.thread_time()
            result = original(buffer)
            spent.append(time.thread_time() - start)
            return result

        return call

    originals = {name: getattr(buckets, name) for name in ("nonfinite_flag", "look_at_reduced")}
    for name, original in originals.items():
        setattr(buckets, name, timed(original))
    try:
        yield spent
    finally:
        for name, original in originals.items():
            setattr(buckets, name, original)


def sdcguard_steps(rank: int, workload: Workload) -> dict[str, Step]:
    """The same model under sdcguard: its matrix products checked, and its comparison of the replicas."""
    from sdcguard import SDCGuard
    from sdcguard.replica import check_replicas

    model, optimizer = workload.trainee()
    batch = workload.batch(rank)
    guard = SDCGuard(every=1).protect(model.module)
    numbers = itertools.count()

    def step(*, products: bool, replicas: bool) -> None:
        optimizer.zero_grad(set_to_none=True)
        if products:
            with guard.on_step(next(numbers)):
                workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        else:
            workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if replicas:
            check_replicas(model.parameters())

    return {
        "sdcguard: products checked": lambda: step(products=True, replicas=False),
        "sdcguard: weights, every step": lambda: step(products=False, replicas=True),
    }


def main() -> int:
    """Run the benchmark; print the table, and write the JSON where asked. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Workload.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4, help="steps of a mode that follow one another in a round")
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    arguments = parser.parse_args()
    workload = Workload.of(arguments)
    before = machine()
    os.environ.update(MALLOC_MMAP_THRESHOLD_=KEPT_BYTES, MALLOC_TRIM_THRESHOLD_=KEPT_BYTES)
    per_rank = run_ranks(_measure, workload, (arguments.rounds, arguments.steps))
    report = {
        "machine": before,
        "load_average_1_minute_at_the_end": machine()["load_average_1_minute"],
        "setting": {**workload.setting(), "rounds": arguments.rounds, "steps": arguments.steps},
        **_summary(per_rank),
    }
    _print_table(report)
    store(arguments.json, report)
    best = ("directly_timed", "cpu")
    reached = {name: next(target[key] for key in best if key in target) for name, target in report["targets"].items()}
    return int(any(reached[name] > limit for name, limit in TARGETS.items()))


def _measure(rank: int, workload: Workload, rounds_and_steps: tuple[int, int]) -> dict[str, list[list[float]]]:
    """Mode -> [wall seconds, processor seconds, those of the checks' calls] a step, of this rank and each round; on
    audits also the processor seconds of each of `PARTS`."""
    rounds, steps = rounds_and_steps
    modes = {**plain_steps(rank, workload), **guarded_steps(rank, workload)}
    if workload.autocast and find_spec("sdcguard") is not None:
        modes |= sdcguard_steps(rank, workload)
    order, shuffle = list(modes), random.Random(0)  # noqa: S311 - the same order on every rank
    seconds: dict[str, list[list[float]]] = {mode: [] for mode in modes}
    for number in range(rounds + WARM_UP_ROUNDS):
        shuffle.shuffle(order)
        for mode in order:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            timing = parts_timed() if mode == AUDIT else nullcontext(dict[str, float]())
            with timing as parts, hook_timed() as hook:
                checks = sum(modes[mode]() or 0.0 for _ in range(steps))
            spent = [time.perf_counter() - wall, time.process_time() - processor, checks + sum(hook)]
            spent += [parts[part] for part in PARTS if parts]
            if number >= WARM_UP_ROUNDS:
                seconds[mode].append([value / steps for value in spent])
    return seconds


def _summary(per_rank: Sequence[dict[str, list[list[float]]]]) -> dict[str, Any]:
    rounds = range(len(per_rank[0][PLAIN]))
    wall = {mode: [max(rank[mode][i][0] for rank in per_rank) for i in rounds] for mode in per_rank[0]}
    cpu = {mode: [sum(rank[mode][i][1] for rank in per_rank) for i in rounds] for mode in per_rank[0]}
    checks = {mode: [sum(rank[mode][i][2] for rank in per_rank) for i in rounds] for mode in per_rank[0]}

    def audit_in_passes(seconds: dict[str, list[float]]) -> float:
        extra = [(seconds[AUDIT][i] - seconds[ALWAYS_ON][i]) / seconds[ALONE][i] for i in rounds]
        return round(statistics.median(extra), 3)

    passes = {
        part: statistics.median(
            sum(rank[AUDIT][i][3 + place] for rank in per_rank) / sum(rank[ALONE][i][1] for rank in per_rank)
            for i in rounds
        )
        for place, part in enumerate(PARTS)
    }
    modes: dict[str, dict[str, Any]] = {
        mode: {
            "median_wall_seconds": round(statistics.median(wall[mode]), 5),
            "median_cpu_seconds": round(statistics.median(cpu[mode]), 5),
            "wall_ratio_to_plain": _ratio(wall, mode),
            "cpu_ratio_to_plain": _ratio(cpu, mode),
        }
        for mode in wall
    }
    for mode in (ALWAYS_ON, WEIGHTS, SAVING):
        direct = statistics.median(c / p for c, p in zip(checks[mode], cpu[PLAIN], strict=True))
        modes[mode]["directly_timed_share"] = round(direct, 5)
    targets = {
        "always_on_ratio": {
            "wall": modes[WEIGHTS]["wall_ratio_to_plain"]["median"],
            "cpu": modes[WEIGHTS]["cpu_ratio_to_plain"]["median"],
            "directly_timed": round(1 + modes[WEIGHTS]["directly_timed_share"], 4),
            "at_most": TARGETS["always_on_ratio"],
        },
        "audit_in_passes": {
            "wall": audit_in_passes(wall),
            "cpu": audit_in_passes(cpu),
            "directly_timed": round(sum(passes[part] for part in AUDIT_PARTS), 3),
            "at_most": TARGETS["audit_in_passes"],
        },
    }
    parts = {part: round(share, 4) for part, share in passes.items()}
    return {"modes": modes, "audited_step_in_passes": parts, "targets": targets}


def _ratio(seconds: dict[str, list[float]], mode: str) -> dict[str, float]:
    ratios = [value / base for value, base in zip(seconds[mode], seconds[PLAIN], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {"median": round(statistics.median(ratios), 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}


def _print_table(report: dict[str, Any]) -> None:
    setting = report["setting"]
    before, after = report["machine"]["load_average_1_minute"], report["load_average_1_minute_at_the_end"]
    print(
        f"{setting['ranks']} ranks, {setting['parameters']:,} parameters, forward in {setting['forward_in']}, "
        f"{setting['tokens_per_rank_and_step']:,} tokens a rank and step, {setting['rounds']} rounds of "
        f"{setting['steps']} steps, load {before} to {after}"
    )
    print(f"{'step':<34}{'wall ms':>9}{'ratio':>8}{'cpu ms':>9}{'ratio':>8}   quartiles of the cpu ratio")
    for mode, row in report["modes"].items():
        cpu = row["cpu_ratio_to_plain"]
        print(
            f"{mode:<34}{1000 * row['median_wall_seconds']:>9.1f}{row['wall_ratio_to_plain']['median']:>8.3f}"
            f"{1000 * row['median_cpu_seconds']:>9.1f}{cpu['median']:>8.3f}"
            f"   {cpu['quartile_1']:.3f} to {cpu['quartile_3']:.3f}"
            + (f"   checks' own calls {share:.2%}" if (share := row.get("directly_timed_share")) else "")
        )
    print("processor time of an audited step's parts, in forward and backward passes:")
    for part, share in report["audited_step_in_passes"].items():
        print(f"    {part:<44}{share:>7.3f}")
    for name, target in report["targets"].items():
        print(f"{name}: {target}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
