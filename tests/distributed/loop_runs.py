"""Loops of one's own that leave calls out, skip batches or train two models, as ranks of test_loops.py run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import attach
from truestep.guard import CorruptionDetected, Guard
from truestep.schedule import Schedule
from truestep.training_loop import train


class Scaled(nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))

    def forward(self, batch: Tensor) -> Tensor:
        """[n, 8] -> [n, 4]."""
        head: Tensor = self.head(self.layer(batch * self.scale).relu())
        return head


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


@dataclass
class Loop:
    """A guarded model on one rank, and the calls around a step."""

    rank: int
    audit_every: int = 2
    saved: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.ddp = DistributedDataParallel(Scaled())
        self.attachment = attach(self.ddp)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        schedule = Schedule(audit_every=self.audit_every, check_every=2)
        self.guard = Guard(self.ddp, self.optimizer, schedule, compute_loss=loss_of, checkpoints=self.saved.append)

    def start(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.guard.start_step(step, batch_of(step, self.rank))

    def backward(self, step: int, factor: float = 1.0) -> Tensor:
        loss = loss_of(self.ddp, batch_of(step, self.rank)) * factor
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self, loss: Tensor) -> None:
        self.guard.before_update(loss)
        self.optimizer.step()
        self.guard.after_update()

    def traces(self) -> dict[str, Any]:
        """What a step that is over must not leave behind."""
        return {
            "in front of forwards": sum(len(module._forward_pre_hooks) for module in self.ddp.module.modules()),
            "on gradients": sum(len(parameter._backward_hooks or {}) for parameter in self.ddp.parameters()),
            "on the update": len(self.optimizer._optimizer_step_pre_hooks),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }


def _said(run: Callable[[], None]) -> str:
    try:
        run()
    except (ValueError, CorruptionDetected) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_before_update(rank: int) -> dict[str, Any]:
    """The loss is NaN at step 2."""
    loop = Loop(rank)

    def run() -> None:
        for step in range(6):
            loop.start(step)
            loop.backward(step, float("nan") if step == 2 else 1.0)
            loop.optimizer.step()
            loop.guard.after_update()

    return {"said": _said(run), "saved": loop.saved}


def without_start_step(rank: int) -> dict[str, str]:
    """`start_step` is called once only; `after_update` never, or every time; and `before_update` twice in a step."""
    said = {}
    for case in ("neither", "with after_update", "twice"):
        loop = Loop(rank, audit_every=1)

        def run(loop: Loop = loop, case: str = case) -> None:
            for step in range(3):
                if step == 0:
                    loop.start(step)
                loss = loop.backward(step)
                loop.guard.before_update(loss)
                if case == "twice":
                    loop.guard.before_update(loss)
                loop.optimizer.step()
                if case == "with after_update":
                    loop.guard.after_update()

        said[case] = _said(run)
    return said


def skipped_batches(rank: int) -> dict[str, Any]:
    """Every rank leaves out the same batches; some behind `start_step`, some behind a backward that gave NaN, some
    behind `before_update`."""
    loop = Loop(rank)
    for step in range(25):
        loop.start(step)
        if step % 4 == 1:
            continue
        loss = loop.backward(step, float("nan") if step % 4 == 2 else 1.0)
        if step % 4 == 2:
            continue
        if step % 8 == 7:
            loop.guard.before_update(loss)
            continue
        loop.update(loss)
    last_judged = loop.traces()
    loop.start(25)
    loop.guard.leave_step()
    return {"last judged": last_judged, "last left": loop.traces(), "checks": loop.guard.checks}


def failed_training(rank: int) -> dict[str, Any]:
    """`train`, left over an exception of the loss on every rank in an audited step."""
    torch.manual_seed(7)
    loop = Loop(rank)

    def failing(model: Any, batch: Tensor) -> Tensor:
        if loop.attachment.current_step == 3:
            raise ValueError("a label is out of range")
        return loss_of(model, batch)

    batches = (batch_of(step, rank) for step in range(8))
    schedule = Schedule(audit_every=2, check_every=2)
    said = _said(
        lambda: train(loop.ddp, loop.attachment, loop.optimizer, batches, failing, None, None, schedule) and None
    )
    return {"said": said, **loop.traces()}


def code_in_settings(rank: int) -> dict[str, Any]:
    """The optimizer's settings hold a function, which its update asks for the learning rate, and an object."""
    loop = Loop(rank)
    (group,) = loop.optimizer.param_groups
    group["schedule"], group["owner"] = lambda step: 0.01 / (1 + step), loop

    def set_rate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        group["lr"] = group["schedule"](loop.attachment.current_step)

    loop.optimizer.register_step_pre_hook(set_rate)

    def run() -> None:
        for step in range(4):
            loop.start(step)
            loop.update(loop.backward(step))

    return {"said": _said(run), "saved": loop.saved, "checks": loop.guard.checks}


def two_models(rank: int) -> dict[str, Any]:
    """As a GAN has them, their steps interleaved; what torch's modes are afterwards."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    loops = [Loop(rank, audit_every=every) for every in (2, 3)]
    for step in range(6):
        for loop in loops:
            loop.start(step)
        losses = [loop.backward(step) for loop in loops]
        for loop, loss in zip(loops, losses, strict=True):
            loop.update(loss)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    return {"fill": fill, "checks": [loop.guard.checks for loop in loops], **loops[0].traces()}
