"""One start of a small run that keeps checkpoints: what the checkpoints' benchmarks and tests with real ranks share."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from truestep.checkpoints import VerifiedCheckpoints
from truestep.collectives import CpuGroup
from truestep.contract import CheckpointRef, IdentityRow, NodeName, Rank, RunRef, Step, canonical_bytes
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.protocols import ResumePoint, SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "functions": {"own_functions": True},
    "shares": {"distributed": True},
    "background": {"distributed": True, "asynchronous": True},
}
"""Options of `OneRun`: every way to save."""
NEED_A_GROUP = ("shares", "background")


class AloneGroup:
    """The collectives of one rank: starting Gloo in every process would take longer than what is tested."""

    rank, size = 0, 1

    def gather_rows(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """This rank's row."""
        return [json.loads(canonical_bytes(row))]

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """What this rank, the source, passes."""
        assert data is not None
        assert source == 0
        return data


@dataclass
class AttachedRun:
    """What `attach` gives, without DDP."""

    cpu_group: AloneGroup | CpuGroup
    run: RunRef
    identities: tuple[IdentityRow, ...]
    resumed: ResumePoint | None = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.cpu_group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cpu_group.size


class OneRun:
    """One rank of one start of a run; of all ranks where there is a process group, else alone."""

    def __init__(self, root_uri: str, seed: int, outbox: Path, *, own_functions: bool = False, **options: Any) -> None:
        """own_functions: save by a pair of functions as a user may have them. options: of `VerifiedCheckpoints`."""
        group = AloneGroup() if dist.group.WORLD is None else CpuGroup(dist.group.WORLD)
        attempt_id = group.broadcast_bytes(uuid.uuid4().hex.encode() if group.rank == 0 else None, 0).decode()
        run = RunRef(run_id="run", attempt_id=attempt_id, world_size=group.size, checkpoint_root=root_uri)
        rows = tuple(
            IdentityRow(rank=Rank(rank), local_rank=0, node_name=NodeName(f"node-{rank}")) for rank in range(group.size)
        )
        self.attachment = AttachedRun(group, run, rows)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(seed + 1 + group.rank)
        reporter = EventReporter(rows[group.rank], run, Outbox(outbox), None)
        self._saves = 0
        options |= {"load": self._read, "save": self._write if own_functions else None}
        self.checkpoints = VerifiedCheckpoints(
            root_uri, self.attachment, self.model, self.optimizer, reporter=reporter, **options
        )

    def save(self, step: int) -> CheckpointRef | None:
        """Save what stands."""
        weights, table = fingerprint_model(self.model)
        optimizer, _ = fingerprint_optimizer(self.optimizer, self.model)
        evidence = SaveEvidence(
            step=Step(step),
            weights_fingerprint=weights,
            tensor_fingerprints=table,
            optimizer_fingerprint=optimizer,
            checks={},
        )
        return self.checkpoints.save(evidence)

    def _write(self, directory: Path) -> None:
        """Rank 0 what all have, every rank a file of its own."""
        if self.attachment.rank == 0:
            torch.save(self.model.state_dict(), directory / "weights")
            (directory / "moments").mkdir()
            torch.save(self.optimizer.state_dict(), directory / "moments" / "all")
        self._saves += 1
        own = directory / f"rank-{self.attachment.rank}"
        own.write_text(f"rank {self.attachment.rank}, save {self._saves}")

    def _read(self, directory: Path) -> None:
        self.model.load_state_dict(torch.load(directory / "weights", weights_only=True))
        self.optimizer.load_state_dict(torch.load(directory / "moments" / "all", weights_only=True))
        rank = self.attachment.rank
        assert (directory / f"rank-{rank}").read_text().startswith(f"rank {rank}, ")
