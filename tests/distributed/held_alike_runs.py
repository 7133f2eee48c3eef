"""Healthy trainings whose ranks do not hold the same, each beside plain DDP; and faults in what a program keeps
equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.constant_buffer_runs import flip
from truestep.attachment import attach
from truestep.guard import CorruptionDetected, Guard
from truestep.schedule import Schedule

At = Callable[[nn.Module, int, int], None]
"""(module, rank, step)"""


class Net(nn.Module):
    """Two layers, a constant, an average that nothing writes to by itself, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(batch * self.scale).relu())
        return result


class CountsOnRank0(Net):
    """Its forward writes to a buffer on rank 0 alone."""

    def forward(self, batch: Tensor) -> Tensor:
        if dist.get_rank() == 0 and self.training:
            self.seen += len(batch)
        return super().forward(batch)


class MakesOnRank0(Net):
    """Its first forward makes a buffer on rank 0 alone."""

    def forward(self, batch: Tensor) -> Tensor:
        if dist.get_rank() == 0 and not hasattr(self, "shown"):
            self.register_buffer("shown", batch.detach().mean(0), persistent=False)
        return super().forward(batch)


def nothing(_module: nn.Module, _rank: int, _step: int) -> None:
    """Where a run has nothing to do."""


def batch_of(step: int, rank: int) -> Tensor:
    """Another one on every rank and step."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean of the squares."""
    result: Tensor = model(batch).square().mean()
    return result


def run(
    rank: int,
    kind: type[Net] = Net,
    *,
    prepare: Callable[[nn.Module, int], None] | None = None,
    behind_backward: At = nothing,
    behind_update: At = nothing,
    behind_all: At = nothing,
    audit_every: int | None = 3,
    guarded: bool = True,
    **ddp: Any,
) -> str:
    """How 14 steps ended, with the tensors that an alarm names."""
    torch.manual_seed(7)
    module = kind()
    if prepare is not None:
        prepare(module, rank)
    model = DistributedDataParallel(module, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = None
    if guarded:
        attach(model)
        schedule = Schedule(audit_every=audit_every, check_every=1 if audit_every is None else 2)
        guard = Guard(model, optimizer, schedule, compute_loss=loss_of, checkpoints=lambda _: None)
    try:
        for step in range(14):
            optimizer.zero_grad()
            batch = batch_of(step, rank)
            if guard:
                guard.start_step(step, batch)
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            behind_backward(module, rank, step)
            if guard:
                guard.before_update(loss)
            optimizer.step()
            behind_update(module, rank, step)
            if guard:
                guard.after_update()
            behind_all(module, rank, step)
    except CorruptionDetected as detected:
        alarm = detected.alarm
        names = alarm.evidence.get("differing_tensor_names")
        return f"{alarm.check} at {alarm.step}: {alarm.verdict.kind} {list(alarm.suspect_ranks)} {names}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def average_on_rank_0(module: nn.Module, rank: int, _step: int) -> None:
    """A moving average of the weights that DDP is to copy."""
    if rank == 0:
        with torch.no_grad():
            module.average.mul_(0.9).add_(module.layer.weight[0], alpha=0.1)


def average_of_the_weights(module: nn.Module, _rank: int, _step: int) -> None:
    """The same on every rank."""
    with torch.no_grad():
        module.average.mul_(0.9).add_(module.layer.weight[0], alpha=0.1)


def average_of_the_batches(module: nn.Module, rank: int, step: int) -> None:
    """Each rank's own."""
    module.average.mul_(0.9).add_(batch_of(step, rank).mean(0), alpha=0.1)


def numbered(module: nn.Module, rank: int) -> None:
    """A buffer with the rank's number."""
    module.register_buffer("number", torch.full((4,), float(rank)))


def ignored(name: str, make: Callable[[int], Any]) -> Callable[[nn.Module, int], None]:
    """A buffer, or a parameter where `make` gives one, that DDP is told to ignore."""

    def prepare(module: nn.Module, rank: int) -> None:
        made, (_, _, last) = make(rank), name.rpartition(".")
        if isinstance(made, nn.Parameter):
            module.layer.register_parameter(last, made)
        else:
            module.register_buffer(last, made, persistent=False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name])  # type: ignore[no-untyped-call]

    return prepare


def sparse(layout: str) -> Callable[[nn.Module, int], None]:
    """A buffer of this layout."""

    def prepare(module: nn.Module, _rank: int) -> None:
        dense = torch.eye(8)
        module.register_buffer("adjacency", dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())

    return prepare


def inference_ones(_rank: int) -> Tensor:
    """Counts no versions."""
    with torch.inference_mode():
        return torch.ones(8)


def quantized_ones(_rank: int) -> Tensor:
    """Integers with a scale."""
    return torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)


HEALTHY: dict[str, dict[str, Any]] = {
    "rank 0 averages behind the backward, DDP copies": {"behind_backward": average_on_rank_0},
    "rank 0 averages behind the update, DDP copies": {"behind_update": average_on_rank_0},
    "rank 0 averages behind the update, nobody copies": {
        "behind_update": average_on_rank_0,
        "broadcast_buffers": False,
    },
    "rank 0 counts in its forward": {"kind": CountsOnRank0},
    "rank 0 makes a buffer to show": {"kind": MakesOnRank0, "broadcast_buffers": False},
    "the loop averages each rank's batches, DDP copies": {"behind_update": average_of_the_batches},
    "the loop averages each rank's batches": {"behind_all": average_of_the_batches, "broadcast_buffers": False},
    "the loop averages the weights": {"behind_update": average_of_the_weights},
    "a rank's number": {"prepare": numbered, "broadcast_buffers": False},
    "a rank's number, ignored by DDP": {"prepare": ignored("number", lambda rank: torch.full((4,), float(rank)))},
    "a rank's own parameter, ignored by DDP": {
        "prepare": ignored("layer.own", lambda rank: nn.Parameter(torch.full((4,), float(rank)))),
        "audit_every": None,
    },
    "a sparse buffer": {"prepare": sparse("coo"), "broadcast_buffers": False},
    "a CSR buffer": {"prepare": sparse("csr"), "broadcast_buffers": False},
    "a buffer on meta, ignored by DDP": {"prepare": ignored("shape", lambda _: torch.zeros(8, device="meta"))},
    "a buffer made in inference mode, ignored by DDP": {"prepare": ignored("ones", inference_ones)},
    "a quantized buffer, ignored by DDP": {"prepare": ignored("steps", quantized_ones)},
}


def healthy(rank: int) -> dict[str, list[str]]:
    """Name -> how plain DDP ended, and how the guarded run did."""
    results = {}
    for name, options in HEALTHY.items():
        results[name] = [run(rank, guarded=False, **options), run(rank, **options)]
        dist.barrier()
    return results


def flip_at(step: int, name: str, *, once: At = nothing) -> At:
    """Behind the update of `step`, a bit of the tensor flips in rank 1's memory; `once` comes first, on every step."""

    def at(module: nn.Module, rank: int, now: int) -> None:
        once(module, rank, now)
        if rank == 1 and now == step:
            flip(
                module.get_parameter(name).data if name in dict(module.named_parameters()) else module.get_buffer(name),
                2,
                22,
            )

    return at


FAULTS: dict[str, dict[str, Any]] = {
    "average": {"behind_update": flip_at(9, "average", once=average_of_the_weights), "broadcast_buffers": False},
    "scale": {"behind_update": flip_at(9, "scale")},
    "layer.frozen": {
        "behind_update": flip_at(9, "layer.frozen"),
        "prepare": ignored("layer.frozen", lambda _: nn.Parameter(torch.ones(4), requires_grad=False)),
    },
    "layer.weight": {"behind_update": flip_at(9, "layer.weight")},
}


def faulty(rank: int) -> dict[str, str]:
    """Tensor -> how the run ended in which it flipped."""
    return {name: run(rank, audit_every=None, **options) for name, options in FAULTS.items()}


def audited_with_own_parameters(rank: int) -> str:
    """What an audit says of parameters that DDP does not keep equal."""
    return run(rank, prepare=ignored("layer.own", lambda number: nn.Parameter(torch.full((4,), float(number)))))
