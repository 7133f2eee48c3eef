"""Losses and models that ask torch.distributed for their rank, as ranks of test_rank_dependence.py run them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.loop_runs import Scaled, batch_of, loss_of
from truestep.attachment import attach
from truestep.checks.ring_replay import AuditSetupError
from truestep.guard import CorruptionDetected, Guard
from truestep.schedule import Schedule


class Weighing(Scaled):
    """Weighs by its rank in a segment that the backward computes again, reentrantly or not."""

    reentrant = False

    def forward(self, batch: Tensor) -> Tensor:
        """[n, 8] -> [n, 4]."""
        hidden: Tensor = checkpoint(self._hidden, batch.requires_grad_(), use_reentrant=self.reentrant)
        head: Tensor = self.head(hidden)
        return head

    def _hidden(self, batch: Tensor) -> Tensor:
        hidden: Tensor = self.layer(batch * self.scale).relu()
        return hidden * (1 + get_rank())


class WeighingReentrantly(Weighing):
    """The other way of checkpointing."""

    reentrant = True


class CompiledWeighing(Scaled):
    """Its compiled part has the rank's number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = torch.compile(lambda hidden: hidden * (1 + get_rank()), backend="eager")

    def forward(self, batch: Tensor) -> Tensor:
        """[n, 8] -> [n, 4]."""
        head: Tensor = super().forward(batch)
        weighed: Tensor = self.weigh(head)
        return weighed


class Compiled(Scaled):
    """A compiled part that asks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.halve = torch.compile(lambda hidden: hidden * 0.5, backend="eager")

    def forward(self, batch: Tensor) -> Tensor:
        """[n, 8] -> [n, 4]."""
        half: Tensor = self.halve(super().forward(batch))
        return half


def heavier_on_rank_0(model: Any, batch: Tensor) -> Tensor:
    return loss_of(model, batch) * (1.5 if dist.get_rank() == 0 else 1.0)


def nan_on_rank_0(model: Any, batch: Tensor) -> Tensor:
    return loss_of(model, batch) * (float("nan") if get_rank() == 0 else 1.0)


def asks_a_group(group: dist.ProcessGroup) -> Callable[[Any, Tensor], Tensor]:
    return lambda model, batch: loss_of(model, batch) * (1 + group.rank()) * (1 + dist.get_rank(group))


def _run(rank: int, loss: Any = loss_of, kind: type[nn.Module] = Scaled, *, preflight: bool = True) -> dict[str, Any]:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(kind())
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    schedule = Schedule(audit_every=2, check_every=2)
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("truestep").addHandler(listener)
    guard = Guard(ddp, optimizer, schedule, compute_loss=loss, preflight=preflight)
    end = "trained"
    try:
        for step in range(6):
            optimizer.zero_grad()
            batch = batch_of(step, rank)
            guard.start_step(step, batch)
            value = loss(ddp, batch)
            value.backward()
            guard.before_update(value)
            optimizer.step()
            guard.after_update()
    except CorruptionDetected as detected:
        alarm = detected.alarm
        end = f"{alarm.check} at {alarm.step}: {alarm.verdict.kind} {list(alarm.suspect_ranks)}"
    except AuditSetupError as refused:
        end = f"refused: {refused}"
    logging.getLogger("truestep").removeHandler(listener)
    return {
        "end": end,
        "audited": guard.checks.get("ring_replay"),
        "suspected": [text for text in said if "suspect" in text],
        "rank": dist.get_rank(),
    }


def rank_dependence(rank: int) -> dict[str, Any]:
    """Name -> how the training ended."""
    everybody = dist.new_group([0, 1, 2])
    two, one = dist.new_group([0, 1]), dist.new_group([2])
    own = two if rank < 2 else one
    assert isinstance(everybody, dist.ProcessGroup)
    assert isinstance(own, dist.ProcessGroup)
    results = {
        "a loss that weighs rank 0": _run(rank, heavier_on_rank_0),
        "a group of all": _run(rank, asks_a_group(everybody)),
        "recomputed": _run(rank, kind=Weighing),
        "recomputed, reentrant": _run(rank, kind=WeighingReentrantly),
        "NaN on rank 0": _run(rank, nan_on_rank_0, preflight=False),
        "a group of some": _run(rank, asks_a_group(own), preflight=False),
        "compiled, asks nothing": _run(rank, kind=Compiled),
    }
    # Last: from here on this process has such code.
    results["compiled"] = _run(rank, kind=CompiledWeighing, preflight=False)
    return results
