"""Started by test_killed_saves: for every line, a number of seconds, forks a child that saves, and kills it then."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "trainer_sdk" / "src"))

import torch
from torch import nn

from truestep.checkpoints import VerifiedCheckpoints
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step, canonical_bytes
from truestep.fingerprint import fingerprint_model
from truestep.protocols import ResumePoint, SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter


class AloneGroup:
    """The collectives of one rank: starting Gloo in every child would take longer than what is tested."""

    def gather_rows(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(canonical_bytes(row))]

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        assert data is not None
        assert source == 0
        return data


@dataclass
class AttachedRun:
    cpu_group: AloneGroup
    run: RunRef
    identities: tuple[IdentityRow, ...]
    resumed: ResumePoint | None = None
    rank: int = 0
    world_size: int = 1


def save_without_end(root_uri: str, first_step: int, started: int) -> None:
    """Save one step after the other, every other one promoted; tell `started` when the first begins."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        run = RunRef(run_id="run", attempt_id=uuid.uuid4().hex, world_size=1, checkpoint_root=root_uri)
        row = IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("node-a"))
        attachment = AttachedRun(AloneGroup(), run, (row,))
        torch.manual_seed(first_step)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        reporter = EventReporter(row, run, Outbox(Path(directory, "outbox")), None)
        checkpoints = VerifiedCheckpoints(root_uri, attachment, model, optimizer, reporter=reporter, keep=3)
        os.write(started, b".")
        for step in range(first_step, first_step + 1000):
            weights, table = fingerprint_model(model)
            checkpoints.save(
                SaveEvidence(
                    step=Step(step),
                    weights_fingerprint=weights,
                    tensor_fingerprints=table,
                    optimizer_fingerprint="",
                    checks={},
                )
            )
            if step % 2:
                checkpoints.promote(Step(step))


def main() -> int:
    root_uri, kills = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # the first optimizer imports for seconds; children inherit that
    for number in range(kills):
        seconds = float(sys.stdin.readline())
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            save_without_end(root_uri, number * 1000, write_end)
            os._exit(0)
        os.close(write_end)
        os.read(read_end, 1)
        # Nothing more comes through the pipe unless the child dies by itself: this is a wait that notices that.
        select.select([read_end], [], [], seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(read_end)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
