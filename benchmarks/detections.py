"""What the replay audit and sdcguard 0.4 each detect of the same faults, at the place where sdcguard looks.

    python -m benchmarks.detections --json benchmarks/results/detections.json      (dependency group `comparison`)

A fault changes the result of one matrix product of one `nn.Linear`, forward or backward, as the device hands it over:
below both checks. The audit's side records the faulty pass and replays it without the fault, as a healthy neighbour
does, through the SDK's own recording and replay; sdcguard checks the same faulty pass with every product protected.
An unfaulted twin says whether the fault changed a gradient or the loss at all. A clean pass must alarm neither.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sdcguard import SDCGuard
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import machine, store
from benchmarks.workload import Batch, Workload
from truestep.checks.recording import PassRecording
from truestep.replay import PassResult, replay

PRODUCTS = ("aten::mm", "aten::addmm")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "lowest mantissa bit": lambda values: _flip(values, 0),
    "highest mantissa bit": lambda values: _flip(values, 6),
    "lowest exponent bit": lambda values: _flip(values, 7),
    "sign": lambda values: _flip(values, 15),
    "highest exponent bit": lambda values: _flip(values, 14),
    "value nulled": torch.zeros_like,
    "relative error 0.8%": lambda values: values * 1.0078125,
}
RUNS = (1, 16)
"""Neighbouring elements hit."""


@dataclass(frozen=True)
class Fault:
    """Which product of the pass, counted over forward and backward, and what becomes of its result."""

    product: int
    element: int
    run: int
    kind: str


class FaultyProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the pass's matrix products, and corrupts the result of one."""

    def __init__(self, fault: Fault | None) -> None:
        """None: only counts."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operation."""
        out = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS and out.dtype is torch.bfloat16:
            if self._fault is not None and self.count == self._fault.product:
                _corrupt(out, self._fault)
            self.count += 1
        return out


def main() -> int:
    """Run, print, store. Status 1 where the audit misses a fault that changed something, or a clean pass alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="of each kind and run length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workload = Workload(ranks=1, sequences=4, context=64, width=96, layers=3, dropout=0.0, autocast=True)
    bench = _Bench(workload)
    clean = bench.run(None)
    draw = random.Random(arguments.seed)  # noqa: S311 - reproducible, not secret
    rows: dict[str, Counter[str]] = {}
    for kind in KINDS:
        for run in RUNS:
            row = rows[f"{kind}, {run} element{'s' * (run > 1)}"] = Counter()
            for _ in range(arguments.faults):
                fault = Fault(draw.randrange(bench.products), draw.randrange(1 << 30), run, kind)
                row.update(bench.run(fault))
    print(f"{'fault':<40}{'faults':>8}{'changed':>9}{'audit':>8}{'sdcguard':>10}")
    for name, row in {"none (clean pass)": clean, **rows}.items():
        print(f"{name:<40}{row['faults']:>8}{row['changed']:>9}{row['audit']:>8}{row['sdcguard']:>10}")
    report = {"machine": machine(), "setting": {**workload.setting(), "products": bench.products, **vars(arguments)}}
    report["setting"].pop("json")
    store(arguments.json, {**report, "clean": clean, "rows": rows})
    missed = sum(row["changed"] - row["audit"] for row in rows.values())
    return int(bool(missed or clean["audit"] or clean["sdcguard"]))


class _Bench:
    """One model, plain for the audit and a protected copy for sdcguard."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._module, self._protected = workload.module(), workload.module()
        self._guard = SDCGuard(every=1).protect(self._protected)
        self._batch: Batch = workload.batch(0)
        with FaultyProducts(None) as counting:
            self._truth = self._recorded()
        self.products = counting.count

    def run(self, fault: Fault | None) -> Counter[str]:
        """How many faults, whether it changed anything, and who saw it."""
        with FaultyProducts(fault):
            recording, result = self._recorded_with_inputs()
        replayed = replay(self._module, recording.inputs(), self._workload.loss)
        changed = _words(result) != _words(self._truth)
        before = len(self._guard.log.events)
        with FaultyProducts(fault) as mode:
            self._protected.zero_grad(set_to_none=True)
            with self._guard.on_step(0):
                self._workload.loss(self._protected, self._batch).backward()  # type: ignore[no-untyped-call]
        if mode.count != self.products:
            raise AssertionError(f"sdcguard's pass has {mode.count} products, the plain one {self.products}")
        return Counter(
            faults=int(fault is not None),
            changed=int(changed),
            audit=int(_words(replayed) != _words(result)),
            sdcguard=int(len(self._guard.log.events) > before),
        )

    def _recorded(self) -> PassResult:
        return self._recorded_with_inputs()[1]

    def _recorded_with_inputs(self) -> tuple[PassRecording, PassResult]:
        self._module.zero_grad(set_to_none=True)
        recording = PassRecording(self._module, self._batch, audited=True, loss_scale=1.0)
        loss = self._workload.loss(self._module, self._batch)
        loss.backward()  # type: ignore[no-untyped-call]
        recording.finish(loss)
        assert recording.result is not None
        return recording, recording.result


def _words(result: PassResult) -> tuple[str, dict[str, tuple[str, ...]]]:
    return result.loss, dict(result.gradients)


def _corrupt(out: Tensor, fault: Fault) -> None:
    flat = out.view(-1)
    start = fault.element % (flat.numel() - fault.run + 1)
    piece = flat[start : start + fault.run]
    piece.copy_(KINDS[fault.kind](piece.clone()))


def _flip(values: Tensor, bit: int) -> Tensor:
    mask = (1 << bit) - (1 << 16 if bit == 15 else 0)
    return (values.view(torch.int16) ^ mask).view(torch.bfloat16)


if __name__ == "__main__":
    raise SystemExit(main())
