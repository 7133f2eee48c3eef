"""Runs that save with `torch.distributed.checkpoint`: corrupted and resumed, sharded, and with another world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.scenarios import Run
from truestep.attachment import Membership, attach, join
from truestep.checkpoints import CheckpointError, CheckpointWriteError, VerifiedCheckpoints, list_checkpoints
from truestep.checkpoints.whole import whole_model, whole_optimizer
from truestep.contract import ResumeDirective
from truestep.inject import Fault, arm
from truestep.resumption import resume
from truestep.schedule import Schedule
from truestep.sharded import ShardedGuard

STEPS = 12
FAULTY_RANK = 2
FAULT_STEP = 6
HIDDEN = 8


def recovered_runs(rank: int, root: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A run without truestep; then, for each setting, one that is corrupted from `FAULT_STEP` on, and its resume."""
    clean = Run(rank, attached=False)
    clean.train_plainly(STEPS)
    results: dict[str, Any] = {"clean": clean.state()}
    for name, setting in settings.items():
        results[name] = _corrupted_and_resumed(rank, f"{root}/{name.replace(' ', '-')}", **setting)
    return results


def _corrupted_and_resumed(rank: int, root: str, audit_every: int, save_every: int, **options: Any) -> dict[str, Any]:
    schedule = Schedule(audit_every=audit_every, check_every=save_every)
    faulty = Run(rank)
    if rank == FAULTY_RANK:
        target = "blocks.1.mlp.2"
        arm(faulty.ddp, faulty.optimizer, Fault(site="module_output", target=target, bit=20, first_step=FAULT_STEP))
    assert faulty.attachment is not None
    checkpoints = VerifiedCheckpoints(root, faulty.attachment, faulty.ddp, faulty.optimizer, **options)
    alarm = faulty.train(STEPS, schedule, checkpoints=checkpoints)
    checkpoints.finish()
    faulty.attachment.cpu_group.barrier()
    trust = {record.ref.step: str(record.trust) for record in list_checkpoints(root)}

    again = Run(rank)
    torch.manual_seed(12345)  # what the resume must put back
    assert again.attachment is not None
    checkpoints = VerifiedCheckpoints(root, again.attachment, again.ddp, again.optimizer, **options)
    point = resume(again.attachment, checkpoints)
    second = again.train(STEPS, schedule, point.start_step, checkpoints=checkpoints)
    again.attachment.cpu_group.barrier()
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "second alarm": None if second is None else second.to_json(),
        "trust": trust,
        "start": point.start_step,
        "state": again.state(),
        "files": sorted(path.name for path in Path(root.removeprefix("file://"), "step-00000003").iterdir()),
        "newest trusted": max((r.ref.step for r in list_checkpoints(root) if r.mark), default=None),
    }


def failing_background_save(rank: int, root: str) -> dict[str, Any]:
    """Rank 1 cannot write its share of step 3: the next save says so on every rank, and training could go on."""
    run = Run(rank)
    assert run.attachment is not None
    checkpoints = VerifiedCheckpoints(root, run.attachment, run.ddp, run.optimizer, distributed=True, asynchronous=True)
    if rank == 1:
        original = checkpoints.storage.write_stream

        def refuse(path: str, write: Any, **options: Any) -> Any:
            if "step-00000003/__" in path:
                raise OSError("disk quota exceeded")
            return original(path, write, **options)

        checkpoints.storage.write_stream = refuse  # type: ignore[method-assign]
    said = ""
    try:
        run.train(8, Schedule(audit_every=4, check_every=2), checkpoints=checkpoints)
    except CheckpointWriteError as error:
        said = str(error)
    run.attachment.cpu_group.barrier()
    return {"said": said, "trust": {record.ref.step: str(record.trust) for record in list_checkpoints(root)}}


def _sharded(members: Membership, mesh_shape: tuple[int, int], seed: int, root: str, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = VerifiedCheckpoints(root, members, model, optimizer, distributed=True, **options)
    return model, optimizer, checkpoints


def _train_sharded(members: Membership, parts: Any, steps: range) -> None:
    model, optimizer, checkpoints = parts
    guard = ShardedGuard(
        model, optimizer, Schedule(audit_every=None, check_every=2), checkpoints=checkpoints, members=members
    )
    for step in steps:
        torch.manual_seed(1000 * step + members.rank)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        guard.before_update(step)
        optimizer.step()
        guard.after_update(step)


def _whole(parts: Any) -> list[str]:
    model, optimizer, _ = parts
    return [whole_model(model)[0], whole_optimizer(optimizer, model)[0]]


def _order(root: str, step: int) -> ResumeDirective:
    record = next(record for record in list_checkpoints(root) if record.ref.step == step)
    return ResumeDirective(
        incident_id="by-hand", checkpoint_uri=record.ref.uri, manifest_sha256=record.ref.manifest_sha256, max_step=step
    )


def saved_sharded(rank: int, root: str) -> dict[str, Any]:
    """Two replicas of two shards: train 6 steps, saving at 1, 3, 5; then resume at 3 in a fresh model and go on."""
    assert dist.group.WORLD is not None
    members = join(dist.group.WORLD)
    first = _sharded(members, (2, 2), 7, root)
    _train_sharded(members, first, range(6))
    members.cpu_group.barrier()
    order = _order(root, 3)
    members.cpu_group.barrier()
    again = _sharded(members, (2, 2), 99, root)
    point = resume(members, again[2], directive=order)
    at_3 = _whole(again)
    _train_sharded(members, again, range(point.start_step, 6))
    return {"start": point.start_step, "at 3": at_3, "whole": _whole(first), "again": _whole(again)}


def resumed_in_another_shape(rank: int, root: str) -> dict[str, Any]:
    """Two ranks: what four saved goes into one replica of two shards and into DDP, and into neither unasked."""
    assert dist.group.WORLD is not None
    members, order = join(dist.group.WORLD), _order(root, 3)
    refused = ""
    try:
        resume(members, _sharded(members, (2, 1), 99, root)[2], directive=order)
    except CheckpointError as error:
        refused = str(error)
    into_shards = _sharded(members, (1, 2), 99, root, reshard=True)
    resume(members, into_shards[2], directive=order)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 5)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    attachment = attach(ddp)
    checkpoints = VerifiedCheckpoints(root, attachment, ddp, optimizer, reshard=True)
    resume(attachment, checkpoints, directive=order)
    return {
        "refused": refused,
        "sharded": _whole(into_shards),
        "ddp": [whole_model(ddp.module)[0], whole_optimizer(optimizer, ddp.module)[0]],
    }
