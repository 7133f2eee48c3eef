"""The fault campaign: is every fault that changes a number detected, and is never anyone accused wrongly?

    python -m benchmarks.faults --seeds 3 --ranks 4 --results benchmarks/results/faults.jsonl
    python -m benchmarks.faults --table --results benchmarks/results/faults.jsonl

Resumable: cells that the results file holds are not run again. `--minutes` ends it early. Exit code 1 where a
conclusive verdict was wrong, or a fault that the oracle saw was not detected.

The oracle: on the faulty rank every audited pass and every replay is computed once more with the fault suspended, and
memory is hashed with SHA-256 and compared between ranks. Only what differs could have been seen; the rest is masked.
An averaged gradient that is wrong on all ranks alike is tolerated where the error stays within the reduction check's
tolerance, or hits no step on which the check runs.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.campaign import Progress, Silent, Transformer, appended, batch_of, loss_of, read_rows, run_in_ranks
from benchmarks.fault_cells import MEMORY, PERIOD, REDUCED, SITES, STEPS, Cell, grid
from truestep import Guard, Schedule, attach
from truestep.checks import ring_replay
from truestep.collectives import tensor_bytes
from truestep.contract import Alarm, VerdictKind
from truestep.guard import CorruptionDetected
from truestep.inject import ArmedFault, arm
from truestep.replay import PassResult, replay

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> int:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of the certain faults; the others have one")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no cell after this time")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print the table of what the results file holds")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.ranks < 3:
        parser.error("give at least 1 seed and 3 ranks: naming somebody needs three nodes")
    if not arguments.table:
        run_in_ranks(
            _work, arguments.ranks, arguments.seeds, arguments.ranks, arguments.results, 60 * arguments.minutes
        )
    return report(read_rows(arguments.results))


def _work(rank: int, seeds: int, ranks: int, results: Path, seconds: float) -> None:
    cells = grid(seeds)
    done = {row["cell"] for row in read_rows(results)}
    torch.distributed.barrier()
    labs = {dtype: Laboratory(rank, ranks, dtype) for dtype in DTYPES}
    progress = Progress("fault cells", len(cells), len(done), rank)
    started = time.monotonic()
    cpu = labs["float32"].attachment.cpu_group
    with appended(results, rank) as append:
        for cell in cells:
            if cell.key in done:
                continue
            if cpu.any_true(time.monotonic() - started > seconds):
                return
            row = labs[cell.dtype].run(cell)
            append(row)
            done.add(cell.key)
            progress.show(len(done), "WRONG VERDICT " + cell.key if row["outcome"] == "wrong" else "")


class Laboratory:
    """One model of a data type, put back to its beginning for every cell."""

    def __init__(self, rank: int, ranks: int, dtype: str) -> None:
        """Collective."""
        self._rank, self._ranks = rank, ranks
        torch.manual_seed(7)
        self._ddp = DistributedDataParallel(Transformer().to(DTYPES[dtype]))
        self._beginning = {name: tensor.clone() for name, tensor in self._ddp.module.state_dict().items()}
        self.attachment = attach(self._ddp)
        self.attachment.reporter = Silent()

    def run(self, cell: Cell) -> dict[str, Any]:
        """The cell's row, the same on every rank. Collective."""
        self._ddp.module.load_state_dict(self._beginning)
        optimizer = torch.optim.AdamW(self._ddp.parameters(), lr=1e-3)
        self.attachment.sensor.take()
        armed = arm(self._ddp, optimizer, cell.fault(self._rank)) if self._rank in cell.faulty(self._ranks) else None
        oracle = _Oracle(armed)
        schedule = Schedule(audit_every=PERIOD, check_every=PERIOD)
        guard = Guard(
            self._ddp, optimizer, schedule, compute_loss=loss_of, checkpoints=lambda _step: None, bundles=None
        )
        alarm: Alarm | None = None
        ring_replay.replay = oracle.replay  # type: ignore[attr-defined]
        try:
            for step in range(STEPS[cell.probability]):
                self._step(step, cell, optimizer, guard, oracle)
        except CorruptionDetected as detected:
            alarm = detected.alarm
        finally:
            ring_replay.replay = replay  # type: ignore[attr-defined]
            if armed is not None:
                armed.remove()
        seen = oracle.visible
        if alarm is None and cell.site in MEMORY:
            seen = seen or self._memory_differs(optimizer)
        firings = sorted(armed.steps) if armed else []
        rows = self.attachment.cpu_group.gather_rows({"firings": firings[:64], "visible": bool(seen)})
        return _row(cell, self._ranks, rows, alarm)

    def _step(self, step: int, cell: Cell, optimizer: torch.optim.Optimizer, guard: Guard, oracle: _Oracle) -> None:
        optimizer.zero_grad(set_to_none=True)
        batch = batch_of(cell.number % 997, step, self._rank)
        guard.start_step(step, batch)
        loss = loss_of(self._ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        oracle.compare_training(self._ddp, guard, loss)
        guard.before_update(loss)
        optimizer.step()
        guard.after_update()

    def _memory_differs(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the ranks' weights or optimizer states differ, by a hash that shares nothing with the product's."""
        digest = hashlib.sha256()
        for parameter in self._ddp.parameters():
            digest.update(tensor_bytes(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                digest.update(tensor_bytes(optimizer.state[parameter][key]))
        hashes = [row["hash"] for row in self.attachment.cpu_group.gather_rows({"hash": digest.hexdigest()})]
        return len(set(hashes)) > 1


class _Oracle:
    """Computes on the faulty rank what would have been right."""

    def __init__(self, armed: ArmedFault | None) -> None:
        self._armed = armed
        self.visible = False

    def replay(self, module: Any, inputs: Any, compute_loss: Any) -> PassResult:
        """The product's replay, and once more without the fault."""
        result = replay(module, inputs, compute_loss)
        self._compare(result, module, inputs)
        return result

    def compare_training(self, ddp: DistributedDataParallel, guard: Guard, loss: torch.Tensor) -> None:
        """The recorded pass of an audited step against one without the fault."""
        recording = guard._recording
        if recording is None:
            raise AssertionError("a started step has a recording")
        recording.finish(loss)
        if recording.result is not None and self._armed is not None:
            self._compare(recording.result, ddp.module, recording.inputs())

    def _compare(self, result: PassResult, module: Any, inputs: Any) -> None:
        if self._armed is None:
            return
        self._armed.suspended = True
        right = replay(module, inputs, loss_of)
        self._armed.suspended = False
        if (result.loss, result.gradients) != (right.loss, right.gradients):
            self.visible = True


def _row(cell: Cell, ranks: int, rows: Sequence[dict[str, Any]], alarm: Alarm | None) -> dict[str, Any]:
    firings = sorted(step for row in rows for step in row["firings"])
    visible = any(row["visible"] for row in rows)
    faulty = cell.faulty(ranks)
    verdict = None if alarm is None else alarm.verdict
    if verdict is None:
        outcome = "missed" if visible else "masked"
        if cell.site in REDUCED and firings:
            outcome = "tolerated" if len(faulty) == ranks else "missed"
    elif verdict.kind is VerdictKind.CONCLUSIVE:
        right = cell.site not in REDUCED and set(verdict.suspects) <= set(faulty)
        outcome = "right" if right else "wrong"
    else:
        outcome = str(verdict.kind)
    return {
        "cell": cell.key,
        "site": cell.site,
        "model": cell.model,
        "probability": cell.probability,
        "dtype": cell.dtype,
        "ranks": ranks,
        "faulty": list(faulty) if len(faulty) < ranks else "all",
        "firings": len(firings),
        "visible": visible,
        "outcome": outcome,
        "check": str(alarm.check) if alarm else "",
        "rule": verdict.rule if verdict else "",
        "suspects": list(verdict.suspects) if verdict else [],
        "latency": alarm.step - firings[0] if alarm and firings else None,
    }


def report(rows: Sequence[dict[str, Any]]) -> int:
    """Print the table; 1 where a conclusive verdict was wrong or a visible fault was missed."""
    columns = ("right", "ambiguous", "no accusation", "wrong", "missed", "tolerated", "masked", "not hit")
    print(f"{'site':<29}{'p':>6}{'cells':>7}" + "".join(f"{name:>15}" for name in columns) + f"{'steps to alarm':>16}")
    for site in SITES:
        for probability in STEPS:
            mine = [row for row in rows if row["site"] == site and row["probability"] == probability]
            if not mine:
                continue
            counts = dict.fromkeys(columns, 0)
            for row in mine:
                counts[_column(row)] += 1
            late = sorted(row["latency"] for row in mine if row["latency"] is not None)
            middle = f"{late[len(late) // 2]}, at most {late[-1]}" if late else "-"
            shown = "".join(f"{counts[name]:>15}" for name in columns)
            print(f"{site:<29}{probability:>6}{len(mine):>7}{shown}{middle:>16}")
    wrong = [row["cell"] for row in rows if row["outcome"] == "wrong"]
    missed = [row["cell"] for row in rows if row["outcome"] == "missed"]
    print(f"{len(rows)} cells; wrong conclusive verdicts: {len(wrong)}; visible faults missed: {len(missed)}")
    for cell in [*wrong, *missed]:
        print(f"    {cell}")
    return int(bool(wrong or missed))


def _column(row: dict[str, Any]) -> str:
    outcome: str = row["outcome"]
    if outcome == "masked" and not row["firings"]:
        return "not hit"
    return outcome if outcome in ("right", "ambiguous", "wrong", "missed", "tolerated", "masked") else "no accusation"


if __name__ == "__main__":
    raise SystemExit(main())
