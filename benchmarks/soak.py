"""Clean audited steps over several models and data types: not one alarm may be raised.

    python -m benchmarks.soak --steps 20000 --ranks 3 --results benchmarks/results/clean.jsonl

Every step is audited, and its reduction, update, weights and optimizer state are checked too. Resumable: what the
results file holds is not run again.
"""

from __future__ import annotations

import argparse
import platform
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.campaign import (
    Convolutional,
    Progress,
    Silent,
    Transformer,
    appended,
    batch_of,
    loss_of,
    read_rows,
    run_in_ranks,
)
from truestep import Guard, Schedule, attach
from truestep.attachment import attachment_of
from truestep.guard import CorruptionDetected

SLICE = 50
"""Steps between two rows of the results; each slice is a fresh model with its own seed."""


def _autocast(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


SETTINGS: dict[str, dict[str, Any]] = {
    "transformer, float32": {"model": Transformer},
    "transformer with dropout, float32": {"model": lambda: Transformer(0.2)},
    "transformer with dropout, bfloat16 autocast": {"model": lambda: Transformer(0.2), "loss": _autocast},
    "transformer, bfloat16 weights": {"model": lambda: Transformer().bfloat16()},
    "transformer with dropout, 3 micro-batches": {"model": lambda: Transformer(0.2), "micro_batches": 3},
    "convolutional with BatchNorm, float32": {"model": Convolutional},
    "convolutional with BatchNorm, bfloat16 autocast": {"model": Convolutional, "loss": _autocast},
    "convolutional with BatchNorm, 2 micro-batches": {"model": Convolutional, "micro_batches": 2},
}


def main() -> int:
    """Run what is missing; 1 where any alarm was raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="in all, over the settings")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/clean.jsonl"))
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.ranks < 2:
        parser.error("give at least 1 step and 2 ranks")
    run_in_ranks(_work, arguments.ranks, arguments.steps, arguments.ranks, arguments.results)
    return _report(read_rows(arguments.results))


def _work(rank: int, steps: int, ranks: int, results: Path) -> None:
    names = list(SETTINGS)
    slices = [(names[number % len(names)], number) for number in range(-(-steps // SLICE))]
    done = {row["slice"] for row in read_rows(results)}
    torch.distributed.barrier()
    progress = Progress("clean slices", len(slices), len(done), rank)
    models: dict[str, DistributedDataParallel] = {}
    with appended(results, rank) as append:
        for name, number in slices:
            if number in done:
                continue
            started = time.monotonic()
            if name not in models:
                models[name] = _attached(SETTINGS[name])
            alarm = _slice(rank, models[name], SETTINGS[name], number)
            seconds = round(time.monotonic() - started, 2)
            row = {"slice": number, "setting": name, "ranks": ranks, "steps": SLICE, "alarm": alarm}
            append({**row, "seconds": seconds, "torch": torch.__version__, "machine": platform.machine()})
            done.add(number)
            progress.show(len(done), f"(alarm: {alarm})" if alarm else "")


def _attached(setting: dict[str, Any]) -> DistributedDataParallel:
    """One attached model a setting, for all its slices: a process group a slice would leave threads and sockets."""
    ddp = DistributedDataParallel(setting["model"]())
    attach(ddp).reporter = Silent()
    return ddp


def _slice(rank: int, ddp: DistributedDataParallel, setting: dict[str, Any], seed: int) -> str | None:
    """Train `SLICE` audited steps from weights of the slice's own; the alarm as text, or None."""
    torch.manual_seed(seed)
    ddp.module.load_state_dict(setting["model"]().state_dict())
    attachment_of(ddp).sensor.take()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    torch.manual_seed(1000 * seed + rank)
    loss = setting.get("loss", loss_of)
    schedule = Schedule(audit_every=1, check_every=1, checkpoint_every=1)
    guard = Guard(ddp, optimizer, schedule, compute_loss=loss, checkpoints=lambda _step: None)
    try:
        for step in range(SLICE):
            _step(step, rank, seed, ddp, optimizer, guard, loss, setting.get("micro_batches", 1))
    except CorruptionDetected as detected:
        return str(detected)
    expected = {"nonfinite", "reduction", "ring_replay", "weights", "optimizer_state", "update_replay"}
    if {check for check, step in guard.checks.items() if step == SLICE - 1} != expected:
        raise SystemExit(f"not every check passed on the last step: {guard.checks}")
    return None


def _step(
    step: int,
    rank: int,
    seed: int,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    guard: Guard,
    compute_loss: Any,
    micro_batches: int,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    batches = [batch_of(seed, step * micro_batches + index, rank) for index in range(micro_batches)]
    guard.start_step(step, batches[0] if micro_batches == 1 else None, micro_batches=micro_batches)
    loss = None
    for index, batch in enumerate(batches):
        around = guard.micro_batch(index, batch) if micro_batches > 1 else nullcontext(lambda _loss: None)
        with ddp.no_sync() if index < micro_batches - 1 else nullcontext(), around as done:
            loss = compute_loss(ddp, batch)
            loss.backward()
            done(loss)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    guard.before_update(loss)
    optimizer.step()
    guard.after_update()


def _report(rows: list[dict[str, Any]]) -> int:
    """Print the table; 1 where an alarm was raised."""
    print(f"{'setting':<50}{'steps':>8}{'alarms':>8}{'ms a step':>11}")
    for name in SETTINGS:
        mine = [row for row in rows if row["setting"] == name]
        steps = sum(row["steps"] for row in mine)
        alarms = [row["alarm"] for row in mine if row["alarm"]]
        pace = 1000 * sum(row["seconds"] for row in mine) / max(1, steps)
        print(f"{name:<50}{steps:>8}{len(alarms):>8}{pace:>11.1f}")
        for alarm in alarms:
            print(f"    {alarm}")
    print(f"{sum(row['steps'] for row in rows)} audited steps, {sum(bool(row['alarm']) for row in rows)} alarms")
    return int(any(row["alarm"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
