"""Runs that something is wrong with before the first step, and what the examination says of each. Plain JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.scenarios import RememberingStore, Run, micro_batch, next_token_loss
from truestep import Guard, Schedule, attach, rng, train
from truestep.checks.ring_replay import AuditSetupError
from truestep.contract import to_json
from truestep.doctor import Examined, examine
from truestep.fingerprint import fingerprint_model
from truestep.inject import Fault, arm


class Noisy(nn.Module):
    """Draws from a generator that nobody seeds or restores, in the forward or in the backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.generator = numpy.random.default_rng()

    def forward(self, value: Tensor) -> Tensor:
        if self.where == "forward":
            return value * (1 + 1e-3 * float(self.generator.random()))
        noisy: Tensor = _NoisyBackward.apply(value, self.generator)  # type: ignore[no-untyped-call]
        return noisy


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, generator: numpy.random.Generator) -> Tensor:
        context.generator = generator
        return value * 1

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (1 + 1e-3 * float(context.generator.random())), None


class PutsInto(nn.Module):
    """Uses a kernel that has no deterministic version."""

    def forward(self, value: Tensor) -> Tensor:
        return value + 0 * torch.zeros(4).put_(torch.tensor([0]), torch.ones(1)).sum()


def _tokens(step: int, owner: int) -> tuple[Tensor, Tensor]:
    return micro_batch(step, owner)


def _unseeded(step: int, owner: int) -> tuple[Tensor, Tensor]:
    tokens, targets = micro_batch(step, owner)
    return tokens.roll(int(torch.randint(1, 9, ()))), targets


def _unrepeatable(step: int, owner: int) -> tuple[Tensor, Tensor]:
    tokens, targets = micro_batch(step, owner)
    return tokens, targets + int(numpy.random.default_rng().integers(1, 10**6))


def _another(step: int, owner: int) -> tuple[Tensor, Tensor]:
    return micro_batch(step + 1, owner)


def _foreign(step: int, owner: int) -> tuple[Tensor, Tensor]:
    return micro_batch(step, owner + 10 * (owner != dist.get_rank()))


def _own_only(step: int, owner: int) -> tuple[Tensor, Tensor]:
    if owner != dist.get_rank():
        raise FileNotFoundError(f"shard-{owner}.bin")
    return micro_batch(step, owner)


def _communicating_loss(model: Any, batch: Any) -> Tensor:
    loss = next_token_loss(model, batch)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return loss + 0 * total


def _tuple_loss(model: Any, batch: Any) -> Any:
    return next_token_loss(model, batch), {"accuracy": 1.0}


@dataclass(frozen=True)
class Case:
    """One thing that is wrong."""

    loss: Callable[[Any, Any], Any] = next_token_loss
    rebuild: Callable[[int, int], Any] | None = _tokens
    layer: Callable[[], nn.Module] | None = None
    model: str = "transformer"
    threads_of_rank_1: int = 1
    fault_of_rank_1: dict[str, Any] | None = None


CASES = {
    "healthy": Case(),
    "healthy with running statistics": Case(model="batch_norm"),
    "no rebuild_batch": Case(rebuild=None),
    "unseeded augmentation": Case(rebuild=_unseeded),
    "a batch that is different at every call": Case(rebuild=_unrepeatable),
    "another batch than the trained one": Case(rebuild=_another),
    "other data on another node": Case(rebuild=_foreign),
    "only one's own batch": Case(rebuild=_own_only),
    "noise in the forward": Case(layer=lambda: Noisy("forward")),
    "noise in the backward": Case(layer=lambda: Noisy("backward")),
    "a kernel without deterministic version": Case(layer=PutsInto),
    "mixed thread counts": Case(threads_of_rank_1=2),
    "SyncBatchNorm": Case(layer=lambda: nn.SyncBatchNorm(8), model="batch_norm"),
    "a loss that communicates": Case(loss=_communicating_loss),
    "a loss that is a tuple": Case(loss=_tuple_loss),
    "a device that computes wrongly": Case(fault_of_rank_1={"site": "module_output", "target": "blocks.1.mlp.2"}),
}


def _set_up(rank: int, case: Case) -> Run:
    torch.set_num_threads(case.threads_of_rank_1 if rank == 1 else 1)
    run = Run(rank, case.model, attached=False)
    if case.layer is not None:
        run.ddp.module.add_module("added", case.layer())
        embedding = run.ddp.module.embedding
        if not isinstance(run.ddp.module.added, nn.SyncBatchNorm):
            embedding.register_forward_hook(lambda _m, _i, output: run.ddp.module.added(output))
    run.attachment = attach(run.ddp)
    if case.fault_of_rank_1 is not None and rank == 1:
        arm(run.ddp, run.optimizer, Fault.from_json(case.fault_of_rank_1))
    return run


def _traces(run: Run) -> list[Any]:
    """Everything that an examination must leave alone."""
    module = run.ddp.module
    return [
        fingerprint_model(module)[0],
        [None if p.grad is None else p.grad.tolist() for p in module.parameters()],
        {name: buffer.tolist() for name, buffer in module.named_buffers()},
        rng.capture().fingerprint(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()],
        torch.is_grad_enabled(),
    ]


def examinations(rank: int) -> dict[str, Any]:
    """Every case of `CASES`, one after the other in one group."""
    told = {}
    for name, case in CASES.items():
        run = _set_up(rank, case)
        assert run.attachment is not None
        for parameter in run.ddp.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        before = _traces(run)
        diagnosis = examine(run.attachment, Examined(run.ddp, case.loss, micro_batch(3, rank), case.rebuild, 3))
        told[name] = {"diagnosis": to_json(diagnosis), "coverage": diagnosis.coverage, "left": _traces(run) == before}
    torch.set_num_threads(1)
    return told


def _train(run: Run, schedule: Schedule, *, rebuild: Any = _tokens, store: Any = None, preflight: bool = True) -> bool:
    """Six steps; whether an alarm was raised."""
    assert run.attachment is not None
    alarm = train(
        run.ddp,
        run.attachment,
        run.optimizer,
        run.batches(6),
        next_token_loss,
        rebuild,
        store,
        schedule,
        preflight=preflight,
    )
    return alarm is not None


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def guarded_runs(rank: int) -> dict[str, Any]:
    """Training with a preflight: bits, downgrade, refusal, and a second guard of the same attempt."""
    messages = _Messages()
    logging.getLogger("truestep").addHandler(messages)
    schedule = Schedule(audit_every=3, check_every=3)
    told: dict[str, Any] = {}
    for preflight in (False, True):
        run = Run(rank, "batch_norm")
        alarm = _train(run, schedule, preflight=preflight)
        told[f"preflight {preflight}"] = {"alarm": alarm, **run.state()}
    run = _set_up(rank, CASES["noise in the backward"])
    store = RememberingStore()
    told["loss only"] = {
        "alarm": _train(run, schedule, store=store),
        "saved": len(store.saved),
        "promoted": store.promoted,
        "said": sum("added (Noisy)" in text for text in messages.texts),
    }
    run = Run(rank)
    try:
        _train(run, schedule, rebuild=_unseeded)
    except AuditSetupError as error:
        told["refused"] = str(error)
    told["twice"] = _two_guards(rank)
    return told


def _two_guards(rank: int) -> list[int]:
    """Passes that each of two guards of one attempt has made when the first step begins."""
    run, calls = Run(rank), [0]

    def counted(model: Any, batch: Any) -> Tensor:
        calls[0] += not isinstance(model, DistributedDataParallel)
        return next_token_loss(model, batch)

    made = []
    for _ in range(2):
        guard = Guard(run.ddp, run.optimizer, Schedule(audit_every=5), compute_loss=counted, preflight=True)
        guard.start_step(0, micro_batch(0, rank))
        made.append(calls[0])
        calls[0] = 0
        counted(run.ddp, micro_batch(0, rank)).backward()  # type: ignore[no-untyped-call]
        guard.before_update()
    return made
