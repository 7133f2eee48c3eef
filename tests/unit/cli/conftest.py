"""Runs the command line in this process, and keeps real checkpoints of a small model to run it on."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from truestep.checkpoints import VerifiedCheckpoints
from truestep.cli import main
from truestep.collectives import CpuGroup
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.protocols import ResumePoint, SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter


@dataclass(frozen=True)
class Printed:
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Standard output with its wrapping undone."""
        return " ".join(self.out.split())

    @property
    def complaint(self) -> str:
        """Standard error with its wrapping undone."""
        return " ".join(self.err.split())


@pytest.fixture
def truestep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Printed]:
    """``truestep("plan", "--gpus", "8", ...)`` on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> Printed:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Printed(ended.value.code, printed.out, printed.err)

    return call


@dataclass
class AttachedRun:
    """What `attach` gives, for a run of one process without DDP."""

    cpu_group: CpuGroup
    run: RunRef
    identities: tuple[IdentityRow, ...]
    rank: Rank
    world_size: int
    resumed: ResumePoint | None = None


@dataclass(frozen=True)
class SavedRun:
    """A model and the checkpoints it was saved into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpoints: VerifiedCheckpoints

    def save(self, step: int) -> str:
        """Train one step, save; the checkpoint's URI."""
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        combined, table = fingerprint_model(self.model)
        evidence = SaveEvidence(
            step=Step(step),
            weights_fingerprint=combined,
            tensor_fingerprints=table,
            optimizer_fingerprint=fingerprint_optimizer(self.optimizer, self.model)[0],
            checks={"weights": step},
        )
        return self.checkpoints.save(evidence).uri


@pytest.fixture(scope="module")
def cpu_group(world_of_one: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuGroup]:
    """A Gloo group of one; ends with the module, as other tests start groups of their own."""
    with world_of_one(tmp_path_factory.mktemp("store")):
        world = dist.group.WORLD
        assert world is not None
        yield CpuGroup(world)


@pytest.fixture
def start(cpu_group: CpuGroup, tmp_path: Path) -> Callable[..., SavedRun]:
    """Starts a run that saves below a root: ``start(root_uri, **arguments of VerifiedCheckpoints)``."""

    def begin(root_uri: str, **options: Any) -> SavedRun:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = RunRef(run_id="run", attempt_id=uuid.uuid4().hex, world_size=1, checkpoint_root=root_uri)
        row = IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("node-a"))
        reporter = EventReporter(row, run, Outbox(tmp_path / "outbox"), None)
        attachment = AttachedRun(cpu_group, run, (row,), row.rank, run.world_size)
        checkpoints = VerifiedCheckpoints(root_uri, attachment, model, optimizer, reporter=reporter, **options)
        return SavedRun(model, optimizer, checkpoints)

    return begin


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def saved(root: Path, start: Callable[..., SavedRun]) -> tuple[Path, Path]:
    """Checkpoints of steps 9 (trusted) and 19 (written)."""
    run = start(root.as_uri())
    run.save(9)
    run.save(19)
    run.checkpoints.promote(Step(14))
    return root / "step-00000009", root / "step-00000019"


def flip_bit_of_file(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(bytes(content))
