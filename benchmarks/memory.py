"""Peak memory of an audited step against a plain one, each in fresh processes.

    python -m benchmarks.memory --json benchmarks/results/memory.json

The kernel's own high-water mark of each rank's resident memory (VmHWM), reset after warm-up; the C allocator is told to
return every larger block at once, so that resident is what is in use. Reported above what the process held before its
model was made, so that the interpreter and torch do not flatter the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.overhead import ALWAYS_ON, AUDIT, EVERYTHING, PLAIN, guarded_steps, plain_steps
from benchmarks.record import machine, store
from benchmarks.workload import Workload, run_ranks

MODES = (PLAIN, ALWAYS_ON, AUDIT, EVERYTHING)
TARGET = 1.10
STEPS = 3
BLOCK_BYTES = str(1 << 16)


def main() -> int:
    """Run, print, store. Status 1 where an audit's peak is above the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Workload.add_arguments(parser)
    parser.add_argument("--json", type=Path, default=None, help="write the report here as well")
    arguments = parser.parse_args()
    workload = Workload.of(arguments)
    os.environ.update(MALLOC_MMAP_THRESHOLD_=BLOCK_BYTES, MALLOC_TRIM_THRESHOLD_=BLOCK_BYTES, MALLOC_ARENA_MAX="1")
    peaks = {mode: run_ranks(_peak, workload, mode) for mode in MODES}
    plain = statistics.median(peaks[PLAIN])
    rows = {
        mode: {"peak_bytes": values, "ratio_to_plain": round(statistics.median(values) / plain, 4)}
        for mode, values in peaks.items()
    }
    for mode, row in rows.items():
        print(f"{mode:<34}{statistics.median(peaks[mode]) / 2**20:>9.1f} MiB{row['ratio_to_plain']:>8.3f}")
    report: dict[str, Any] = {"machine": machine(), "setting": workload.setting(), "modes": rows, "at_most": TARGET}
    store(arguments.json, report)
    return int(statistics.median(peaks[AUDIT]) > TARGET * plain)


def _peak(rank: int, workload: Workload, mode: str) -> int:
    """Bytes above what the process held before its model, at the highest of a few steps."""
    before = _status("VmRSS")
    make = plain_steps if mode == PLAIN else guarded_steps
    step = make(rank, workload)[mode]
    step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"the kernel does not report {field}; this benchmark needs Linux")


if __name__ == "__main__":
    raise SystemExit(main())
