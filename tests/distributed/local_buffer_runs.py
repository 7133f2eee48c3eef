"""Runs of a model that keeps a moving average of its own: saved every way there is, and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import batch_norm
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.constant_buffer_runs import flip
from truestep.attachment import attach, join
from truestep.checkpoints import VerifiedCheckpoints, list_checkpoints
from truestep.contract import Step
from truestep.guard import Guard
from truestep.resumption import resume
from truestep.schedule import Schedule
from truestep.sharded import ShardedGuard
from truestep.training_loop import train

WAYS = ("whole", "shares", "sharded")
_EVERY_OTHER = Schedule(audit_every=None, check_every=2)


class Averaging(nn.Module):
    """Follows what it sees in a buffer, and has a constant in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("activity", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(batch) * self.scale
        with torch.no_grad():
            self.activity.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return hidden


class Making(nn.Module):
    """Makes buffers in its first pass: a constant, and a scale taken from this rank's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(batch)
        if not hasattr(self, "scale"):
            self.register_buffer("mask", torch.ones(4))
            self.register_buffer("scale", 1 / (1 + hidden.detach().std(0)))
        return hidden * self.scale * self.mask


def made_in_the_first_pass(rank: int, flip_before: int | None) -> dict[str, Any]:
    """flip_before: the step in front of which the constant changes on rank 1."""
    torch.manual_seed(1)
    module = Making()
    model = DistributedDataParallel(module)
    attachment = attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def batches() -> Iterator[torch.Tensor]:
        for step in range(4):
            if step == flip_before and rank == 1:
                module.mask.data[2] = -37.0  # type: ignore[index]
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    schedule = Schedule(audit_every=1, check_every=1)
    alarm = train(model, attachment, optimizer, batches(), loss, None, None, schedule)
    return {
        "alarm": None if alarm is None else [str(alarm.check), alarm.step, list(alarm.suspect_ranks)],
        "scale": module.scale.tolist(),  # type: ignore[operator]
    }


class Silent(nn.Module):
    """Follows what it sees by writes that raise no version, and has a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.register_buffer("activity", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(batch_norm(batch, self.mean, self.variance, training=True)) * self.scale  # type: ignore[arg-type]
        self.activity.data.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)  # type: ignore[operator, union-attr]
        return hidden


def written_silently(rank: int, audit_every: int | None, flipped: int | None, **ddp: bool) -> dict[str, Any]:
    """flipped: the rank whose constant flips in memory behind the forward of step 2."""
    torch.manual_seed(1)
    module = Silent()
    model = DistributedDataParallel(module, **ddp)  # type: ignore[arg-type]
    attachment = attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generators = [torch.Generator().manual_seed(10 * step + rank) for step in range(5)]
    versions = [module.mean._version, module.activity._version]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        if rank == flipped and attachment.current_step == 2 and torch.equal(batch, given[2]):
            flip(module.scale, 1, 27)  # type: ignore[arg-type]
        return result

    given = [torch.randn(4, 8, generator=generator) for generator in generators]
    alarm = train(
        model, attachment, optimizer, given, loss, None, None, Schedule(audit_every=audit_every, check_every=1)
    )
    return {
        "alarm": None if alarm is None else [str(alarm.check), alarm.step, list(alarm.suspect_ranks)],
        "names": [] if alarm is None else alarm.evidence["differing_tensor_names"],
        "silent": versions == [module.mean._version, module.activity._version],
        "activity": module.activity.tolist(),  # type: ignore[operator]
    }


class _Start:
    """One start of a run on this rank."""

    def __init__(self, rank: int, way: str, root: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank, self.module = rank, Averaging()
        model: Any
        if way == "sharded":
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            model = fully_shard(self.module, mesh=mesh)
            members = join(torch.distributed.group.WORLD)  # type: ignore[arg-type]
        else:
            model = DistributedDataParallel(self.module)
            members = attach(model)  # type: ignore[assignment]
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.checkpoints = VerifiedCheckpoints(root, members, model, self.optimizer, distributed=way != "whole")
        self.guard: Any
        if way == "sharded":
            self.guard = ShardedGuard(
                model, self.optimizer, _EVERY_OTHER, members=members, checkpoints=self.checkpoints
            )
        else:
            self.guard = Guard(model, self.optimizer, _EVERY_OTHER, checkpoints=self.checkpoints)
        self.point = resume(members, self.checkpoints)

    def train(self, steps: int) -> None:
        sharded = isinstance(self.guard, ShardedGuard)
        for step in range(self.point.start_step, self.point.start_step + steps):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + self.rank))
            if not sharded:
                self.guard.start_step(step, batch)
            self.model(batch).square().mean().backward()
            self.guard.before_update(*[step] * sharded)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.guard.after_update(*[step] * sharded)


def saved_and_resumed(rank: int, root: str) -> dict[str, Any]:
    """Way -> what its checkpoint says, and what a resume from it found."""
    return {way: _saved_and_resumed(rank, way, f"{root}/{way}") for way in WAYS}


def _saved_and_resumed(rank: int, way: str, root: str) -> dict[str, Any]:
    first = _Start(rank, way, root, seed=1)
    first.train(2)
    first.checkpoints.promote(Step(1))
    torch.distributed.barrier()
    (record,) = list_checkpoints(root)
    again = _Start(rank, way, root, seed=2)
    found = again.module.activity.tolist()  # type: ignore[operator]
    again.train(2)
    manifest = record.manifest
    return {
        "listed": sorted(manifest.tensor_fingerprints) if manifest else [],
        "start": again.point.start_step,
        "expected": first.module.activity.tolist(),  # type: ignore[operator]
        "found": found,
    }
