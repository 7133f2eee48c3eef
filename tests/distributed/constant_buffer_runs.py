"""Runs under DDP's default, which copies rank 0's buffers to every rank: memory that flips, and programs that write."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import attach
from truestep.checks.constant_buffers import STEADY_STEPS
from truestep.guard import CorruptionDetected, Guard
from truestep.schedule import Schedule

STEPS = STEADY_STEPS + 6
AT = STEADY_STEPS + 2
"""Step in front of which the buffers change."""


class Constants(nn.Module):
    """Buffers that no forward writes to, of several types, and a batch norm."""

    scale: Tensor
    mask: Tensor
    order: Tensor
    count: Tensor
    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))
        self.register_buffer("mask", torch.tensor([True, True, False, True, True, False, True, True]))
        self.register_buffer("order", torch.arange(8).flip(0).contiguous())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        """Uses them all."""
        hidden: Tensor = self.norm(self.layer(batch)) * self.scale * self.mask
        return hidden[:, self.order.clamp(0, 7)] / self.temperature


class OwnStatistics(Constants):
    """A batch norm over buffers of other names than torch's, whose kernel writes without raising their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, batch: Tensor) -> Tensor:
        """The same behind one more norm."""
        result: Tensor = super().forward(functional.batch_norm(batch, self.mean, self.variance, training=True))  # type: ignore[arg-type]
        return result


def flip(buffer: Tensor, element: int, bit: int) -> None:
    """As memory does: nobody is told."""
    place = buffer.data_ptr() + element * buffer.element_size() + bit // 8
    byte = ctypes.c_uint8.from_address(place)
    byte.value ^= 1 << bit % 8


def _only(rank: int, step: int, change: Callable[[Constants], Any]) -> Callable[[Constants, int, int], Any]:
    return lambda module, me, now: change(module) if (me, now) == (rank, step) else None


def _load(module: Constants) -> None:
    module.load_state_dict({**module.state_dict(), "scale": _negated(module)})


def _negated(module: Constants) -> Tensor:
    changed = module.scale.clone()
    changed[3].neg_()
    return changed


def _replace(module: Constants) -> None:
    module.scale = _negated(module)


def _same_memory(module: Constants) -> None:
    version = module.scale._version
    module.scale = torch.from_numpy(module.scale.numpy())
    while module.scale._version < version:
        module.scale.mul_(1)
    module.scale.data[3].neg_()


def _to(module: Constants) -> None:
    module.scale = module.scale.double().float()
    module.scale[2] *= -1


def _from_rank_1(module: Constants, rank: int, step: int) -> None:
    if step == AT:
        sent = module.scale if rank != 1 else module.scale.neg()
        torch.distributed.broadcast(sent, 1)


def _average(module: Constants, rank: int, step: int) -> None:
    module.scale.data.mul_(0.9).add_(rank + step, alpha=0.1)


def _numpy(module: Constants) -> None:
    module.scale.numpy()[:] = 3.0


FLIPS: dict[str, tuple[int, Callable[[Constants], Any]]] = {
    "float, rank 0": (0, lambda module: flip(module.scale, 3, 27)),
    "float, rank 1": (1, lambda module: flip(module.scale, 3, 27)),
    "lowest bit of a float, rank 0": (0, lambda module: flip(module.scale, 7, 0)),
    "integer, rank 0": (0, lambda module: flip(module.order, 5, 33)),
    "bool, rank 0": (0, lambda module: flip(module.mask, 1, 4)),
}
"""Name -> whose memory flips, and what in it."""

WRITES: dict[str, Callable[[Constants, int, int], Any]] = {
    "nothing": lambda _module, _rank, _step: None,
    "of PyTorch, one bit": _only(0, AT, lambda module: module.scale[3].neg_()),
    "data, whole": _only(0, AT, lambda module: module.scale.data.copy_(torch.full((8,), 3.0))),
    "data, one element": _only(0, AT, lambda module: module.scale.data[3].zero_()),
    "data, on rank 2": _only(2, AT, lambda module: module.scale.data.copy_(torch.full((8,), 3.0))),
    "data, all ranks alike": lambda module, _rank, step: module.scale.data[3].neg_() if step == AT else None,
    "data, one bit on two ranks": lambda m, rank, step: m.scale.data[3].neg_() if rank < 2 and step == AT else None,
    "data, one bit every third step": lambda m, rank, step: m.scale.data[3].neg_() if rank == step % 3 == 0 else None,
    "data, an average on each rank": _average,
    "data, a mask": _only(0, AT, lambda module: module.mask.data[1].fill_(False)),
    "data, a table's next value": _only(0, AT, lambda module: module.order.data[1].add_(1)),
    "data, a count": _only(0, AT, lambda module: module.count.data.add_(4)),
    "data, a halved number": _only(0, AT, lambda module: module.temperature.data.mul_(0.5)),
    "other data": _only(0, AT, lambda module: setattr(module.scale, "data", _negated(module))),
    "NumPy": _only(0, AT, _numpy),
    "DLPack": _only(0, AT, lambda module: torch.from_dlpack(module.scale).mul_(3)),
    "ctypes": _only(0, AT, lambda module: ctypes.memset(module.scale.data_ptr(), 0, 32)),
    "shared memory": _only(0, AT, lambda module: module.scale.share_memory_().numpy().__setitem__(3, 9.0)),
    "a collective": _from_rank_1,
    "a load": _only(0, AT, _load),
    "another tensor": _only(0, AT, _replace),
    "another tensor on the same memory": _only(0, AT, _same_memory),
    "to and back": _only(0, AT, _to),
}
"""What programs do to buffers without a fault: (module, rank, step), in front of every step."""


def runs(rank: int) -> dict[str, Any]:
    """Case -> how it ended."""
    results: dict[str, Any] = {}
    for name, (faulty, strike) in FLIPS.items():
        results[name] = _run(rank, _only(faulty, AT, strike))
    results["early"] = _run(rank, _only(0, STEADY_STEPS - 1, FLIPS["float, rank 0"][1]))
    results["behind the forward"] = _run(rank, lambda *_: None, after_backward=_only(0, AT, FLIPS["float, rank 0"][1]))
    for name, write in WRITES.items():
        results[f"written: {name}"] = _run(rank, write)
    results["own statistics"] = _run(rank, lambda *_: None, kind=OwnStatistics)
    return results


def _nothing(_module: Constants, _rank: int, _step: int) -> None:
    pass


def flipped_among_two(rank: int) -> dict[str, Any]:
    """Nobody else can say which of the two is right."""
    return _run(rank, _only(0, AT, FLIPS["float, rank 0"][1]))


def flipped_in_front_of_other_copies(rank: int) -> dict[str, Any]:
    """DDP copies in front of every forward: also in a validation, and of every micro-batch."""
    results = {}
    for count in (1, 3, 200):
        # The looks of 200 forwards do not fit into what is kept unread.
        strike = _only(0, AT, FLIPS["float, rank 0"][1])
        results[f"validated {count}"] = _run(rank, lambda *_: None, validated=count, before_validation=strike)
    for index in range(3):
        results[f"micro-batch {index}"] = _accumulated(rank, index)
    for name in ("data, whole", "data, all ranks alike", "of PyTorch, one bit", "data, an average on each rank"):
        results[f"written: {name}"] = _run(rank, lambda *_: None, validated=3, before_validation=WRITES[name])
    return results


def _accumulated(rank: int, flipped_before: int) -> dict[str, Any]:
    """Three micro-batches a step, without no_sync."""
    torch.manual_seed(7)
    module = Constants()
    ddp = DistributedDataParallel(module)
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    guard = Guard(ddp, optimizer, Schedule(audit_every=None, check_every=10**6))
    for step in range(STEPS):
        guard.start_step(step, micro_batches=3)
        for index in range(3):
            if (rank, step, index) == (0, AT, flipped_before):
                FLIPS["float, rank 0"][1](module)
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * index + rank))
            with guard.micro_batch(index, batch) as done:
                loss = ddp(batch).square().mean()
                loss.backward()
                done(loss)
        try:
            guard.before_update()
        except CorruptionDetected as detected:
            return {"alarm": detected.alarm.to_json(), "steps": step}
        optimizer.step()
        optimizer.zero_grad()
        guard.after_update()
    return {"alarm": None, "steps": STEPS}


def _run(
    rank: int,
    in_front: Callable[[Constants, int, int], Any],
    *,
    after_backward: Callable[[Constants, int, int], Any] = _nothing,
    kind: type[Constants] = Constants,
    validated: int = 0,
    before_validation: Callable[[Constants, int, int], Any] = _nothing,
) -> dict[str, Any]:
    """The copies are compared after no update here: only what DDP would make equal can be seen."""
    torch.manual_seed(7)
    module = kind()
    ddp = DistributedDataParallel(module)
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    guard = Guard(ddp, optimizer, Schedule(audit_every=None, check_every=10**6))
    struck, steps, alarm = False, 0, None
    for step in range(STEPS):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        _validate(ddp, validated, lambda step=step: before_validation(module, rank, step))  # type: ignore[misc]
        struck |= _changed(module, lambda step=step: in_front(module, rank, step))  # type: ignore[misc]
        guard.start_step(step, batch)
        loss = ddp(batch).square().mean()
        loss.backward()
        struck |= _changed(module, lambda step=step: after_backward(module, rank, step))  # type: ignore[misc]
        try:
            guard.before_update(loss)
        except CorruptionDetected as detected:
            alarm = detected.alarm.to_json()
            break
        optimizer.step()
        optimizer.zero_grad()
        guard.after_update()
        steps += 1
    return {"alarm": alarm, "steps": steps, "struck": struck, "watched": sorted(_watched(guard))}


def _validate(ddp: DistributedDataParallel, count: int, in_the_middle: Callable[[], Any]) -> None:
    ddp.eval()
    with torch.no_grad():
        for number in range(count):
            if number == count // 2:
                in_the_middle()
            ddp(torch.ones(4, 8))
    ddp.train()


def _watched(guard: Guard) -> set[str]:
    return {*guard._constants._seen[-1].buffers} - guard._constants._dropped


def _changed(module: nn.Module, change: Callable[[], Any]) -> bool:
    with torch.no_grad():
        before = {name: bytes(buffer.numpy().tobytes()) for name, buffer in module.named_buffers()}
        change()
        return before != {name: bytes(buffer.numpy().tobytes()) for name, buffer in module.named_buffers()}
