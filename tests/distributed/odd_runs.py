"""Runs that could hang or accuse somebody: losses that communicate, schedules that differ, buffers that one rank alone
changes, a warm-up pass through a communication hook that remembers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.features import Centred
from tests.distributed.scenarios import Run, Transformer, micro_batch, next_token_loss
from truestep.attachment import attach
from truestep.audit_steps import ScheduleError
from truestep.checks.ring_replay import AuditSetupError
from truestep.guard import CorruptionDetected, Guard
from truestep.inject import Fault, arm
from truestep.schedule import Schedule


def odd_runs(rank: int) -> dict[str, Any]:
    """All of them, in one process group."""
    return {
        "communicating": communicating(rank, poisoned=False),
        "communicating, NaN": communicating(rank, poisoned=True),
        "schedules": different_schedules(rank),
        "constant": constant_buffer(rank),
        "power": warmed_up_power_sgd(rank),
    }


def averaged_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that averages itself over ranks for the log, as many do."""
    loss = next_token_loss(model, batch)
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    return loss + 0 * shown.nan_to_num()


def communicating(rank: int, *, poisoned: bool) -> dict[str, Any]:
    """Audits at step 1; where poisoned, rank 1's gradient is NaN at step 0 and only others replay it."""
    run = Run(rank)
    if poisoned and rank == 1:
        arm(run.ddp, run.optimizer, Fault(site="gradient", target="blocks.1.mlp.2", model="nan"))
    try:
        alarm = run.train(4, Schedule(audit_every=2, check_every=2), compute_loss=averaged_loss)
    except AuditSetupError as refused:
        return {"refused": str(refused), "alarm": None}
    return {"refused": "", "alarm": None if alarm is None else alarm.to_json()}


def different_schedules(rank: int) -> dict[str, Any]:
    """Rank 2 audits other steps."""
    run = Run(rank)
    try:
        run.train(8, Schedule(audit_every=lambda step: step == (5 if rank == 2 else 3), check_every=100))
    except ScheduleError as refused:
        return {"refused": str(refused), "steps": len(run.losses)}
    return {"refused": "", "steps": len(run.losses)}


class CentredWithConstant(Centred):
    """Beside the moving average a constant, which no forward writes to on a healthy rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))


def constant_buffer(rank: int) -> dict[str, Any]:
    """Rank 1's forward writes to the constant once, at step 2."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(CentredWithConstant(), forward_sync_buffers=False)
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    guard = Guard(ddp, optimizer, Schedule(audit_every=2, check_every=2), compute_loss=next_token_loss)
    try:
        for step in range(6):
            optimizer.zero_grad()
            batch = micro_batch(step, rank)
            guard.start_step(step, batch)
            loss = next_token_loss(ddp, batch)
            if rank == 1 and step == 2:
                dict(ddp.module.named_buffers())["scale"][3] += 1
            loss.backward()  # type: ignore[no-untyped-call]
            guard.before_update(loss)
            optimizer.step()
            guard.after_update()
    except CorruptionDetected as detected:
        return {"alarm": detected.alarm.to_json()}
    return {"alarm": None}


def warmed_up_power_sgd(rank: int) -> dict[str, Any]:
    """The state of PowerSGD before and after a warm-up pass."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Transformer())
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    attach(ddp, comm_hook=(state, powerSGD_hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    guard = Guard(ddp, optimizer, Schedule(audit_every=50), compute_loss=next_token_loss)
    for step in range(4):
        guard.start_step(step, micro_batch(step, rank))
        loss = next_token_loss(ddp, micro_batch(step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        guard.before_update(loss)
        guard.after_update()
    before = _remembered(state)
    guard.warm_up(micro_batch(4, rank))
    return {"before": before, "after": _remembered(state)}


def _remembered(state: PowerSGDState) -> Any:
    errors = {str(index): error.tolist() for index, error in state.error_dict.items()}
    return copy.deepcopy([state.iter, errors, {str(i): q.tolist() for i, q in state.q_memory_dict.items()}])
