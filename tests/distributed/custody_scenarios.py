"""What moves bytes between ranks and checkpoints, and who may attach: scenarios of transport and custody."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.distributed.scenarios import Run
from truestep import collectives
from truestep.attachment import BannedGpuError
from truestep.checkpoints import VerifiedCheckpoints
from truestep.collectives import CpuGroup
from truestep.contract import ResumeDirective, Step, to_json
from truestep.inject import Fault, arm
from truestep.resumption import resume
from truestep.schedule import Schedule


def _mount_directive(rank: int, text: str) -> None:
    """Put the directive where it is read, whole at any time: the ranks share the path."""
    mounted = Path(os.environ["TRUESTEP_DIRECTIVE"])
    own = mounted.with_name(f"directive-{rank}.json")
    own.write_text(text)
    own.replace(mounted)


def banned_attach(rank: int, banned: list[str]) -> dict[str, Any]:
    """Attach where a directive bans GPUs."""
    directive = ResumeDirective(
        incident_id="incident-1",
        checkpoint_uri="file:///x/step-00000004",
        manifest_sha256="0" * 64,
        max_step=Step(4),
        banned_gpu_uuids=tuple(banned),
        issued_at="2026-01-01T00:00:00Z",
    )
    _mount_directive(rank, json.dumps(to_json(directive)))
    try:
        Run(rank)
    except BannedGpuError as refused:
        return {"error": str(refused)}
    return {"error": ""}


def transport(rank: int) -> dict[str, Any]:
    """The collectives that evidence travels with, one row of which is corrupted on its first arrival."""
    world = dist.group.WORLD
    assert world is not None
    group = CpuGroup(world)
    rows = group.gather_rows({"rank": rank, "text": "x" * (10 * rank)})
    original, tampered = collectives._to_bytes, [0]

    def tamper(raw: Tensor) -> bytes:
        data = original(raw)
        tampered[0] += 1
        return bytes([data[0] ^ 1, *data[1:]]) if rank == 1 and tampered[0] == 2 else data

    collectives._to_bytes = tamper
    again = group.gather_rows({"rank": rank})
    collectives._to_bytes = original
    moved = group.exchange([(0, 1), (1, 2), (2, 2)], b"payload-%d" % rank)
    return {
        "rows": [[row["rank"], len(row["text"])] for row in rows],
        "again": [row["rank"] for row in again],
        "calls": tampered[0],
        "moved": {str(source): data.decode() for source, data in moved.items()},
        "extremes": group.extremes([rank, -(2**63) + rank, 2**63 - 1 - rank]),
        "broadcast": group.broadcast_bytes(b"from two" if rank == 2 else None, 2).decode(),
        "agrees": [group.agrees({"same": 1}), group.agrees({"rank": rank})],
    }


def custody_run(rank: int, root_uri: str, steps: int, fault_step: int | None, directive: str | None) -> dict[str, Any]:
    """A run with verified checkpoints; rank 2 goes bad at `fault_step`; `directive` orders where it resumes."""
    if directive is not None:
        _mount_directive(rank, directive)
    run = Run(rank)
    assert run.attachment is not None
    checkpoints = VerifiedCheckpoints(root_uri, run.attachment, run.ddp, run.optimizer)
    point = resume(run.attachment, checkpoints)
    if fault_step is not None and rank == 2:
        arm(run.ddp, run.optimizer, Fault(site="module_output", target="blocks.1.mlp.2", bit=20, first_step=fault_step))
    schedule = Schedule(audit_every=5, check_every=5)
    alarm = run.train(steps, schedule, point.start_step, checkpoints=checkpoints)
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "start_step": point.start_step,
        "state": run.state(),
    }
