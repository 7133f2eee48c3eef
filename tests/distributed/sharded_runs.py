"""Training of a small model under FSDP2, with and without replicas, and what is done to its shards."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from truestep.attachment import attach
from truestep.checks.ring_replay import AuditSetupError
from truestep.guard import CorruptionDetected
from truestep.peers import POLL_SECONDS
from truestep.schedule import Schedule
from truestep.sharded import ShardedGuard, ShardingError

STEPS = 6
CHECK_EVERY = 2
TARGET = "2.weight"


def sharded_model(mesh_shape: tuple[int, ...]) -> nn.Module:
    """Two linear layers and a norm, each layer sharded by itself."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def flip(tensor: Any, element: int, bit: int) -> None:
    """One bit of this rank's copy."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.detach().view(-1).view(torch.int32)[element] ^= 1 << bit


def sharded_run(
    rank: int, mesh_shape: list[int], faults: dict[str, str], step_of_fault: int, guarded: bool = True
) -> dict[str, Any]:
    """Train; at `step_of_fault` flip bit 3 of element 2 in a site (weight, exp_avg_sq, gradient) of the ranks named.

    Site batch: the rank's whole batch is NaN instead.
    """
    model = sharded_model(tuple(mesh_shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved: list[int] = []
    schedule = Schedule(audit_every=None, check_every=CHECK_EVERY)
    guard = ShardedGuard(model, optimizer, schedule, checkpoints=saved.append) if guarded else None
    torch.manual_seed(100 + rank)
    target, site = dict(model.named_parameters())[TARGET], faults.get(str(rank))
    alarm = None
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            hit = site if step == step_of_fault else None
            batch = torch.randn(4, 8) * (float("nan") if hit == "batch" else 1.0)
            model(batch).square().mean().backward()  # type: ignore[no-untyped-call]
            if hit == "gradient":
                flip(target.grad, 2, 3)
            if guard:
                guard.before_update(step)
            optimizer.step()
            if hit in ("weight", "exp_avg_sq"):
                flip(target if hit == "weight" else optimizer.state[target]["exp_avg_sq"], 2, 3)
            if guard:
                guard.after_update(step)
    except CorruptionDetected as detected:
        alarm = detected.alarm
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "saved": saved,
        "holders": sorted(guard.holders) if guard else [],
        "weights": {name: p.to_local().tolist() for name, p in model.named_parameters() if isinstance(p, DTensor)},
    }


def several_sharded_runs(rank: int, mesh_shape: list[int], runs: dict[str, list[Any]]) -> dict[str, Any]:
    """Named runs, in one process group. runs: name -> further arguments of `sharded_run`."""
    return {name: sharded_run(rank, mesh_shape, *arguments) for name, arguments in runs.items()}


def refusals(rank: int) -> dict[str, str]:
    """What each setup without anything to compare is told."""
    plain, replicated = sharded_model((4,)), sharded_model((2, 2))
    weights_only = Schedule(audit_every=None)
    attempts = {
        "plain": lambda: _guard(plain, weights_only),
        "one replica": lambda: _guard(sharded_model((1, 4)), weights_only),
        "not sharded": lambda: _guard(nn.Linear(2, 2), weights_only),
        "audits": lambda: _guard(replicated, Schedule(audit_every=10)),
        "attach": lambda: attach(replicated),  # type: ignore[arg-type]
        "no before_update": lambda: _guard(replicated, weights_only).after_update(0),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "accepted"
        except (ShardingError, AuditSetupError, TypeError, ValueError) as refused:
            said[name] = f"{type(refused).__name__}: {refused}"
    return said


def _guard(model: nn.Module, schedule: Schedule) -> ShardedGuard:
    return ShardedGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule)


FAILING, FAILING_STEP = 1, 5


def failing_sharded_run(rank: int, ends: str) -> None:
    """Two replicas of two shards; rank 1 leaves the loop of 8 steps by what `ends` names, the others wait for it.

    "alone": nobody leaves it, and rank 0 has more to do than the others after it.
    """
    model = sharded_model((2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = ShardedGuard(model, optimizer, Schedule(audit_every=None, check_every=CHECK_EVERY))
    last = FAILING_STEP if rank == FAILING and ends == "batches" else STEPS + 2
    for step in range(last):
        fails = rank == FAILING and step == FAILING_STEP
        if fails and ends == "error":
            raise ValueError("a label is out of range")
        if fails and ends == "exit between steps":
            sys.exit(5)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        if fails and ends == "exit":
            sys.exit(5)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.before_update(step)
        optimizer.step()
        guard.after_update(step)
    if ends != "alone":
        guard.end_loop()
    elif rank == 0:
        time.sleep(2 * POLL_SECONDS)  # an evaluation: long enough to hear of an end, if one were told
