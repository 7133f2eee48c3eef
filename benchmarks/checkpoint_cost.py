"""What hashing, manifest and trust cost: the same state saved plainly and by `VerifiedCheckpoints`, in turn.

    python -m benchmarks.checkpoint_cost --gigabytes 1 --rounds 7 --results benchmarks/results/checkpoint_cost.json

Every way writes the same tensors durably (fsync of files and folders), one after the other in every round, in an order
that rotates. The cost is the median over rounds of the ratio within a round. Hashing takes a core of its own, so this
wants a quiet machine: on a busy one wall time says little. Each round also takes the rate of SHA-256 on one core and of
a plain durable write, which say what can be reached: a disk that is slower than SHA-256 hides it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as distributed_save

from benchmarks import record
from benchmarks.checkpoint_run import AttachedRun
from truestep.checkpoints import VerifiedCheckpoints, storage
from truestep.checkpoints.sharded_files import training_state_dict
from truestep.collectives import CpuGroup
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.protocols import SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter

TARGET = 0.03
LAYER = 2048
PIECE = 1 << 28
BYTES_A_LAYER = 3 * 4 * LAYER * LAYER
"""The weight and AdamW's two moments, float32."""


class Bench:
    """One state and the ways to save it below a directory."""

    def __init__(self, root: Path, gigabytes: float) -> None:
        layers = max(1, round(gigabytes * 1e9 / BYTES_A_LAYER))
        torch.manual_seed(0)
        self.root = root
        self.model = nn.ModuleList(nn.Linear(LAYER, LAYER, bias=False) for _ in range(layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bytes = layers * BYTES_A_LAYER
        weights, table = fingerprint_model(self.model)
        state, _ = fingerprint_optimizer(self.optimizer, self.model)
        self._evidence = {"weights_fingerprint": weights, "tensor_fingerprints": table, "optimizer_fingerprint": state}
        self._step = 0
        self._whole, self._shares = self._checkpoints("whole"), self._checkpoints("shares", distributed=True)

    def ways(self) -> dict[str, Callable[[], object]]:
        """Name -> what saves once."""
        return {
            "torch.save": self._plainly,
            "VerifiedCheckpoints": lambda: self._save(self._whole),
            "VerifiedCheckpoints without SHA-256": lambda: self._unhashed(self._whole),
            "torch.distributed.checkpoint": self._distributed,
            "VerifiedCheckpoints(distributed=True)": lambda: self._save(self._shares),
        }

    def clear(self) -> None:
        """Remove what was saved, so that every save starts alike."""
        for directory in self.root.iterdir():
            if directory.name != "store":
                shutil.rmtree(directory)

    def _checkpoints(self, name: str, **options: Any) -> VerifiedCheckpoints:
        root_uri = (self.root / name).as_uri()
        run = RunRef(run_id="run", attempt_id="a" * 32, world_size=1, checkpoint_root=root_uri)
        row = IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("node-a"))
        assert dist.group.WORLD is not None
        attached = AttachedRun(CpuGroup(dist.group.WORLD), run, (row,))  # type: ignore[arg-type]
        reporter = EventReporter(row, run, Outbox(self.root.with_name("outbox")), None)
        return VerifiedCheckpoints(root_uri, attached, self.model, self.optimizer, reporter=reporter, **options)

    def write_plainly(self, piece: bytes) -> None:
        """Memory to the disk, durably."""
        with (self.root / "piece").open("wb", buffering=0) as file:
            file.write(piece)
            os.fsync(file.fileno())
        (self.root / "piece").unlink()

    def _plainly(self) -> None:
        directory = self.root / "plain"
        directory.mkdir()
        for name, state in (("model.pt", self.model.state_dict()), ("optimizer.pt", self.optimizer.state_dict())):
            with (directory / name).open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        for folder in (directory, self.root):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _distributed(self) -> None:
        writer = FileSystemWriter(self.root / "dcp", sync_files=True)
        distributed_save(training_state_dict(self.model, self.optimizer), storage_writer=writer)

    def _save(self, checkpoints: VerifiedCheckpoints) -> None:
        self._step += 1
        checkpoints.save(SaveEvidence(step=Step(self._step), checks={}, **self._evidence))  # type: ignore[arg-type]
        checkpoints.promote(Step(self._step))

    def _unhashed(self, checkpoints: VerifiedCheckpoints) -> None:
        """What SHA-256 alone costs: everything else stays."""
        hashed = storage.HashingWriter.write

        def write(writer: Any, content: Any) -> int:
            view = memoryview(content).cast("B")
            writer._target.write(view)
            writer._bytes += view.nbytes
            return view.nbytes

        storage.HashingWriter.write = write  # type: ignore[method-assign]
        try:
            self._save(checkpoints)
        finally:
            storage.HashingWriter.write = hashed  # type: ignore[method-assign]


PAIRS = {
    "VerifiedCheckpoints": "torch.save",
    "VerifiedCheckpoints(distributed=True)": "torch.distributed.checkpoint",
}
HASHING = ("VerifiedCheckpoints", "VerifiedCheckpoints without SHA-256")


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Seconds of every way in every round, and what they say."""
    ways = bench.ways()
    names = list(ways)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    sha256, disk = [], []
    for number in range(rounds):
        start = number % len(names)
        sha256.append(_rate(lambda piece: hashlib.sha256(piece).digest()))
        disk.append(_rate(bench.write_plainly))
        for name in [*names[start:], *names[:start]]:
            os.sync()
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            ways[name]()
            wall[name].append(round(time.perf_counter() - wall_start, 3))
            cpu[name].append(round(time.process_time() - cpu_start, 3))
            bench.clear()
    pairs = {**PAIRS, "SHA-256 alone": HASHING[1]}
    return {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "sha256_gigabytes_per_second": sha256,
        "durable_write_gigabytes_per_second": disk,
        "median_wall_seconds": {name: statistics.median(values) for name, values in wall.items()},
        "cost_by_wall_time": {
            name: round(_ratio(wall[HASHING[0] if name == "SHA-256 alone" else name], wall[plain]), 4)
            for name, plain in pairs.items()
        },
    }


def _ratio(ours: list[float], plain: list[float]) -> float:
    """Median over rounds of what ours takes more, as a share of plain."""
    return statistics.median(a / b - 1 for a, b in zip(ours, plain, strict=True))


def _rate(act: Callable[[bytes], object]) -> float:
    """Gigabytes a second of what `act` does with a piece of memory."""
    piece = bytes(PIECE)
    os.sync()
    started = time.perf_counter()
    act(piece)
    return round(PIECE / (time.perf_counter() - started) / 1e9, 3)


def main() -> int:
    """Measure, print, store. Status 1 where a cost is above the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the volume to measure; default: a temporary one")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        root = Path(name) / "saved"
        root.mkdir()
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        bench = Bench(root, arguments.gigabytes)
        measure(bench, 1)  # the first save of a process imports and allocates
        report = {"bytes": bench.bytes, "rounds": arguments.rounds, "target": TARGET}
        report |= measure(bench, arguments.rounds)
        dist.destroy_process_group()
    print(
        json.dumps(
            {
                key: report[key]
                for key in (
                    "bytes",
                    "sha256_gigabytes_per_second",
                    "durable_write_gigabytes_per_second",
                    "median_wall_seconds",
                    "cost_by_wall_time",
                )
            },
            indent=2,
        )
    )
    record.store(arguments.results, {**report, "machine": record.machine()})
    return int(any(report["cost_by_wall_time"][name] > TARGET for name in PAIRS))


if __name__ == "__main__":
    raise SystemExit(main())
