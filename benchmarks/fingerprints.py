"""How fast tensors are fingerprinted, against how fast the same bytes can be copied and read.

    python -m benchmarks.fingerprints --json benchmarks/results/fingerprints.json

One thread. The paths take turns, and the best of the rounds counts: what the machine can do, not how busy it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import machine, store
from demo.model import ByteGpt, GptConfig
from truestep.fingerprint import fingerprint_model, fingerprint_tensors
from truestep.fingerprint.eager import eager_sums
from truestep.fingerprint.native import KERNEL
from truestep.fingerprint.tensors import pending_sums, raw_bytes

READ, COPY = "read (sum of int64)", "copy"


def main() -> int:
    """Run, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=40, help="of the large tensor")
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not KERNEL.build():
        print(f"no compiled kernel: {KERNEL.reason}")
    model = ByteGpt(GptConfig()).to(device)
    large = torch.randn(arguments.megabytes * 250_000, device=device)
    subjects: dict[str, tuple[int, dict[str, Callable[[], Any]]]] = {
        f"one tensor of {arguments.megabytes} MB": (4 * large.numel(), _paths(large)),
        "the benchmark model, 41 tensors": (
            4 * sum(parameter.numel() for parameter in model.parameters()),
            {
                "copy": lambda: [parameter.detach().clone() for parameter in model.parameters()],
                "default path": lambda: fingerprint_tensors(dict(model.named_parameters())),
                "with names combined": lambda: fingerprint_model(model),
            },
        ),
    }
    rows: dict[str, dict[str, float]] = {}
    for subject, (length, paths) in subjects.items():
        best = _best_seconds(paths, arguments.rounds, device)
        rows[subject] = {name: round(length / seconds / 1e9, 3) for name, seconds in best.items()}
        print(f"{subject} ({length:,} bytes)")
        for name, rate in rows[subject].items():
            print(f"  {name:<28}{rate:>9.2f} GB/s{rate / rows[subject][COPY]:>8.0%} of copy")
    setting = {"rounds": arguments.rounds, "device": str(device), "kernel": KERNEL.reason or "compiled"}
    store(arguments.json, {"machine": machine(), "setting": setting, "gigabytes_per_second": rows})
    return 0


def _paths(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    target = torch.empty_like(tensor)
    lanes = tensor.view(torch.int64)
    return {
        COPY: lambda: target.copy_(tensor),
        READ: lambda: lanes.sum(),
        "torch operations": lambda: eager_sums(raw_bytes(tensor)),
        "default path": lambda: pending_sums(tensor),
    }


def _best_seconds(paths: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    best = dict.fromkeys(paths, float("inf"))
    for _ in range(rounds + 1):
        for name, path in paths.items():
            start = time.perf_counter()
            path()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    raise SystemExit(main())
