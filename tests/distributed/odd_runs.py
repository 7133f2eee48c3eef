"""Runs that could hang or accuse somebody: losses that communicate, schedules that differ, buffers that one rank alone
changes, a warm-up pass through a communication hook that remembers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.constant_buffer_runs import flip
from tests.distributed.features import Centred
from tests.distributed.scenarios import Run, Transformer, micro_batch, next_token_loss
from truestep.attachment import attach
from truestep.audit_steps import ScheduleError
from truestep.checks.ring_replay import AuditSetupError
from truestep.guard import CorruptionDetected, Guard
from truestep.inject import Fault, arm
from truestep.schedule import Schedule
from truestep.training_loop import train


def odd_runs(rank: int) -> dict[str, Any]:
    """All of them, in one process group."""
    return {
        "communicating": communicating(rank, poisoned=False),
        "communicating, NaN": communicating(rank, poisoned=True),
        "schedules": different_schedules(rank),
        "guards": different_guards(rank),
        "constant": constant_buffer(rank),
        "power": warmed_up_power_sgd(rank),
        "no label, written": without_a_label(rank, writing_loss, rebuilds=False),
        "no label, written, rebuilt": without_a_label(rank, writing_loss, rebuilds=True),
        "no label, popped": without_a_label(rank, popping_loss, rebuilds=False),
        "encoded": encoded_batches(rank),
        "counting, plain": counting(rank, guarded=False),
        "counting, guarded": counting(rank, guarded=True),
        "hook on a parameter": hooked_parameter(rank),
        "opaque": opaque_batches(rank),
        "accumulated": accumulated_nan(rank),
        "rebuilding of too few": unfit_rebuilding(rank, lambda step: micro_batch(step, rank)),
        "rebuilding that raises": unfit_rebuilding(rank, broken_rebuilding),
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


def unlabelled(step: int, rank: int) -> dict[str, Tensor]:
    """Rank 2's batch of step 1 holds no label: its mean is 0/0, on every device."""
    tokens, labels = micro_batch(step, rank)
    return {"tokens": tokens, "labels": torch.full_like(labels, -100) if (step, rank) == (1, 2) else labels.clone()}


def writing_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Makes its labels safe to gather with, in place."""
    labels = batch["labels"]
    counted = labels != -100
    labels[~counted] = 0
    return _mean(model(batch["tokens"]), labels, counted)


def popping_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Takes the labels out of its batch."""
    labels = batch.pop("labels")
    return _mean(model(batch["tokens"]), labels.clamp(min=0), labels != -100)


def _mean(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    return -(chosen * counted).sum() / counted.sum()


def without_a_label(rank: int, loss: Any, *, rebuilds: bool) -> dict[str, Any]:
    """A bug in the data, outside of audit steps, met by a loss that changes its batch."""
    run = Run(rank)
    assert run.attachment is not None
    batches = (unlabelled(step, rank) for step in range(4))
    schedule = Schedule(audit_every=10, check_every=2)
    rebuild = unlabelled if rebuilds else None
    alarm = train(run.ddp, run.attachment, run.optimizer, batches, loss, rebuild, None, schedule)
    return {"alarm": None if alarm is None else alarm.to_json()}


def encoded_batches(rank: int) -> dict[str, Any]:
    """Batches that carry the history of an encoder which nobody wrapped in no_grad."""
    torch.manual_seed(7)
    ddp, encoder = DistributedDataParallel(torch.nn.Linear(16, 4)), torch.nn.Linear(16, 16)
    attachment = attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batches = (encoder(torch.full((2, 16), step + rank + 1.0)) for step in range(4))
    schedule = Schedule(audit_every=2, check_every=2)
    alarm = train(ddp, attachment, optimizer, batches, squared, None, None, schedule)
    return {"alarm": None if alarm is None else alarm.to_json()}


class Counting(torch.nn.Module):
    """Cools down after five training forwards, which it counts in an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 4)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer, at a temperature."""
        self.calls += self.training
        return torch.Tensor.mul(self.inner(inputs), 1.0 if self.calls <= 5 else 0.5)


def counting(rank: int, *, guarded: bool) -> dict[str, Any]:
    """Six steps of a model with Python state, after a warm-up pass and with audits in steps 1 and 3."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Counting())
    batches = [torch.full((2, 16), 0.1 * step + rank) for step in range(6)]
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    schedule = Schedule(audit_every=[1, 3], check_every=2)
    guard = Guard(ddp, optimizer, schedule, compute_loss=squared) if guarded else None
    if guard is not None:
        guard.warm_up(batches[0])
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if guard is not None:
            guard.start_step(step, batch)
        loss = squared(ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if guard is not None:
            guard.before_update(loss)
        optimizer.step()
        if guard is not None:
            guard.after_update()
    return {"weights": ddp.module.inner.weight.tolist(), "calls": ddp.module.calls}


def hooked_parameter(rank: int) -> dict[str, Any]:
    """A hook that clamps gradients in training, and that no replay has."""
    run = Run(rank)
    for parameter in run.ddp.module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    alarm = run.train(2, Schedule(audit_every=2, check_every=2))
    return {"alarm": None if alarm is None else alarm.to_json()}


def opaque_batches(rank: int) -> dict[str, Any]:
    """Batches with something in them of which ranks cannot tell whether it is the same; no audit before step 3."""
    run = Run(rank)
    assert run.attachment is not None
    batches = ((*micro_batch(step, rank), object()) for step in range(4))
    schedule = Schedule(audit_every=4, check_every=2)
    try:
        train(run.ddp, run.attachment, run.optimizer, batches, _of_two, None, None, schedule)
    except AuditSetupError as refused:
        return {"refused": str(refused), "trained": len(run.losses)}
    return {"refused": "", "trained": len(run.losses)}


def _of_two(model: Any, batch: tuple[Tensor, Tensor, object]) -> Tensor:
    return next_token_loss(model, batch[:2])


def broken_rebuilding(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A bug in the user's function, which no audit may take for one in the loss."""
    return micro_batch(step + "1", rank)  # type: ignore[operator]


def unfit_rebuilding(rank: int, rebuild: Any) -> dict[str, Any]:
    """Audits step 1."""
    run = Run(rank)
    try:
        run.train(2, Schedule(audit_every=2, check_every=2), rebuild_batch=rebuild)
    except AuditSetupError as refused:
        return {"refused": str(refused), "trained": len(run.losses)}
    return {"refused": "", "trained": len(run.losses)}


def accumulated_nan(rank: int) -> dict[str, Any]:
    """Rank 2's data is infinite in the second of two micro-batches; step 0 keeps the first."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(torch.nn.Linear(16, 4))
    attach(ddp)
    guard = Guard(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), Schedule(audit_every=9), compute_loss=squared)
    guard.start_step(0, micro_batches=2)
    for index in range(2):
        batch = torch.full((2, 16), float("inf") if (rank, index) == (2, 1) else 1.0)
        with ddp.no_sync() if index == 0 else nullcontext(), guard.micro_batch(index, batch) as done:
            loss = squared(ddp, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            done(loss)
    try:
        guard.before_update(loss)
    except CorruptionDetected as detected:
        return {"alarm": detected.alarm.to_json()}
    return {"alarm": None}


def squared(model: Any, batch: Tensor) -> Tensor:
    """Mean square of the output."""
    return torch.Tensor.mean(model(batch).square())


def different_schedules(rank: int) -> dict[str, Any]:
    """Rank 2 audits other steps."""
    run = Run(rank)
    try:
        run.train(8, Schedule(audit_every=lambda step: step == (5 if rank == 2 else 3), check_every=100))
    except ScheduleError as refused:
        return {"refused": str(refused), "steps": len(run.losses)}
    return {"refused": "", "steps": len(run.losses)}


def different_guards(rank: int) -> dict[str, Any]:
    """Rank 2 saves no checkpoints: the others would wait for its optimizer state."""
    run = Run(rank)
    try:
        saving = None if rank == 2 else lambda _step: None
        run.train(4, Schedule(audit_every=2, check_every=100, checkpoint_every=2), checkpoints=saving)
    except ScheduleError as refused:
        return {"refused": str(refused), "steps": len(run.losses)}
    return {"refused": "", "steps": len(run.losses)}


class CentredWithConstant(Centred):
    """Beside the moving average a constant, which no forward writes to on a healthy rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))


def constant_buffer(rank: int) -> dict[str, Any]:
    """A bit of the constant flips in rank 1's memory at step 2."""
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
                flip(dict(ddp.module.named_buffers())["scale"], 3, 22)
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
