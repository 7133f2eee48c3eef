"""What the checks cost: plain DDP against guarded steps, in the same processes, interleaved.

    python -m benchmarks.overhead --ranks 3 --rounds 15 --json overhead.json

Each round runs one step of every mode, so that a noisy machine disturbs all alike; a ratio is taken within a round, and
the median over rounds is reported. Every rank has one thread: ranks share this machine's cores, as GPUs do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from demo.model import ByteGpt, GptConfig, next_byte_loss
from truestep import Guard, Schedule, attach

MODES = ("plain", "always-on checks", "weights and optimizer compared", "audit")
NEVER = 1 << 30
WARM_UP_ROUNDS = 2


def main() -> int:
    """Run the benchmark; print the table, and write the JSON where asked."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, arguments, directory), daemon=True)
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed; its traceback is above")
        seconds = json.loads((Path(directory) / "seconds.json").read_text())
    report = _report(seconds, arguments)
    _print_table(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _rank(rank: int, arguments: argparse.Namespace, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=f"node-{rank}", TRUESTEP_OUTBOX_DIR=f"{directory}/outbox")
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/no-directive.json"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=arguments.ranks)
    steps = _steps(rank, arguments)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(arguments.rounds + WARM_UP_ROUNDS):
        for mode in MODES:
            dist.barrier()
            start = time.perf_counter()
            steps[mode]()
            if number >= WARM_UP_ROUNDS:
                seconds[mode].append(time.perf_counter() - start)
    if rank == 0:
        (Path(directory) / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _steps(rank: int, arguments: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Mode -> one step of it. The guarded modes share one model; the plain one has its own, which no hook touches."""
    plain, plain_optimizer = _model(arguments)
    guarded, optimizer = _model(arguments)
    attach(guarded)
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.sequences, arguments.context + 1)
    tokens = torch.randint(0, 256, shape, generator=generator)
    batch = tokens[:, :-1], tokens[:, 1:]

    def schedule(**periods: int | None) -> Schedule:
        return Schedule(**{"audit_every": None, "check_every": NEVER, "checkpoint_every": NEVER, **periods})  # type: ignore[arg-type]

    def guard(**periods: int | None) -> Guard:
        return Guard(
            guarded, optimizer, schedule(**periods), compute_loss=next_byte_loss, checkpoints=lambda _step: None
        )

    def plain_step() -> None:
        plain_optimizer.zero_grad(set_to_none=True)
        next_byte_loss(plain, batch).backward()  # type: ignore[no-untyped-call]
        plain_optimizer.step()

    def guarded_step(checks: Guard) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            checks.start_step(0, batch)
            loss = next_byte_loss(guarded, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            checks.before_update(loss)
            optimizer.step()
            checks.after_update()

        return step

    return {
        "plain": plain_step,
        "always-on checks": guarded_step(guard()),
        "weights and optimizer compared": guarded_step(guard(check_every=1, checkpoint_every=1)),
        "audit": guarded_step(guard(audit_every=1)),
    }


def _model(arguments: argparse.Namespace) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = GptConfig(width=arguments.width, layers=arguments.layers, context=arguments.context)
    model = DistributedDataParallel(ByteGpt(config))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _report(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> dict[str, Any]:
    config = GptConfig(width=arguments.width, layers=arguments.layers, context=arguments.context)
    parameters = sum(parameter.numel() for parameter in ByteGpt(config).parameters())
    rows = {}
    for mode in MODES:
        ratios = [value / base for value, base in zip(seconds[mode], seconds["plain"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows[mode] = {
            "median_seconds": round(statistics.median(seconds[mode]), 5),
            "median_ratio_to_plain": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(quarters[0], 3), round(quarters[2], 3)],
        }
    return {
        "machine": {"cpu_count": os.cpu_count(), "platform": platform.machine(), "torch": str(torch.__version__)},
        "setting": {
            "ranks": arguments.ranks,
            "rounds": arguments.rounds,
            "parameters": parameters,
            "tokens_per_rank_and_step": arguments.sequences * arguments.context,
        },
        "modes": rows,
    }


def _print_table(report: dict[str, Any]) -> None:
    setting = report["setting"]
    print(
        f"{setting['ranks']} ranks, {setting['parameters']:,} parameters, "
        f"{setting['tokens_per_rank_and_step']:,} tokens a rank and step, {setting['rounds']} rounds"
    )
    print(f"{'step':<34}{'median ms':>10}{'ratio':>8}   quartiles")
    for mode, row in report["modes"].items():
        low, high = row["ratio_quartiles"]
        milliseconds = 1000 * row["median_seconds"]
        print(f"{mode:<34}{milliseconds:>10.1f}{row['median_ratio_to_plain']:>8.3f}   {low:.3f} to {high:.3f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
