"""An update that one device computed wrongly is contradicted by another node, and no optimizer is accused of itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import scenarios
from tests.distributed.conftest import RunRanks
from truestep.attachment import attach
from truestep.checks import update_replay
from truestep.checks.update_replay import replay_update
from truestep.contract import Alarm
from truestep.fingerprint import fingerprint_model
from truestep.guard import CorruptionDetected, Guard
from truestep.schedule import Schedule

RANKS, FAULTY, STEPS = 3, 1, 4
Parameters = Any


class Averaging(torch.optim.SGD):
    """An optimizer whose update mixes tensors: it cannot be repeated from one of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Scale every gradient by the norm of all."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad / norm, alpha=-1e-3)


class Wrong(torch.optim.AdamW):
    """While `wrong`, this device computes every update wrongly, in the same way each time."""

    wrong = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Flip the lowest bit of the first element of every new weight."""
        super().step(closure)
        if Wrong.wrong:
            flip_every_weight(self)


def sharded(parameters: Parameters) -> torch.optim.Optimizer:
    """ZeRO-1: every rank updates the parameters that it owns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own import warns of its own deprecations
        from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3)  # type: ignore[no-untyped-call]
    return optimizer


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adam, amsgrad, foreach": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "zero": sharded,
    "mixes tensors": lambda p: Averaging(p, lr=1e-3),
    "wrong": lambda p: Wrong(p, lr=1e-3),
}
CLAMPED = "blocks.1.norm.weight"
"""Of the ranks' samples of four tensors in step 1 it is in that of rank 1 alone, and in no other's in step 3."""
CONVICTED_BY = {
    "wrong weight": "weights",
    "wrong moment": "optimizer_state",
    "wrong weight, clamp": "weights",
    "wrong each time": "update_replay",
}
"""The update's own second run contradicts a fault that came once, so the copies tell; a lasting one, third nodes."""


def guarded(
    rank: int, optimizer_name: str, corrupt: Callable[[Any], None] | None = None, *, clamped: str = ""
) -> dict[str, Any]:
    """Audits on steps 1 and 3; `corrupt(optimizer)` runs inside rank `FAULTY`'s update of step 1.

    clamped: a parameter that a hook of the user's holds in bounds, in every update of every rank.
    """
    torch.manual_seed(7)
    ddp = DistributedDataParallel(scenarios.Transformer())
    optimizer = OPTIMIZERS[optimizer_name](ddp.parameters())
    if clamped:
        parameter = ddp.module.get_parameter(clamped)
        optimizer.register_step_post_hook(lambda *_: parameter.data.clamp_(-0.5, 0.5))
    attach(ddp)
    torch.manual_seed(100 + rank)
    guard = Guard(ddp, optimizer, Schedule(audit_every=2, check_every=1000), compute_loss=scenarios.next_token_loss)
    step = 0
    inner = getattr(optimizer, "optim", optimizer)
    inner.register_step_post_hook(lambda *_: corrupt(inner) if corrupt and rank == FAULTY and step == 1 else None)
    alarm: Alarm | None = None
    try:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            batch = scenarios.micro_batch(step, rank)
            guard.start_step(step, batch)
            loss = scenarios.next_token_loss(ddp, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            guard.before_update(loss)
            Wrong.wrong = rank == FAULTY and step == 1
            optimizer.step()
            guard.after_update()
    except CorruptionDetected as detected:
        alarm = detected.alarm
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "passed": guard.checks.get("update_replay"),
        "enabled": guard._updates is not None and guard._updates.enabled,
        "left_out": sorted(guard._updates._left_out) if guard._updates is not None else [],
        "weights": fingerprint_model(ddp)[0],
    }


@torch.no_grad()
def flip_every_weight(optimizer: torch.optim.Optimizer) -> None:
    """The lowest bit of the first element of every weight: the sample is random, this is in it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.view(-1).view(torch.int32)[0] ^= 1


@torch.no_grad()
def flip_every_moment(optimizer: torch.optim.Optimizer) -> None:
    """The lowest bit of a second moment; the weights stay right for steps."""
    for state in optimizer.state.values():
        state["exp_avg_sq"].view(-1).view(torch.int32)[0] ^= 1


def all_runs(rank: int) -> dict[str, Any]:
    """Every optimizer clean, then faults, in one process group."""
    update_replay.SAMPLED_TENSORS = 4
    runs = {name: guarded(rank, name) for name in OPTIMIZERS if name != "wrong"}
    runs["wrong weight"] = guarded(rank, "adamw", flip_every_weight)
    runs["wrong moment"] = guarded(rank, "adamw", flip_every_moment)
    runs["wrong each time"] = guarded(rank, "wrong")
    runs["wrong weight, clamp"] = guarded(rank, "adamw", flip_every_weight, clamped=CLAMPED)
    runs["clamp"] = guarded(rank, "adamw", clamped=CLAMPED)
    runs["wrong weight, zero"] = guarded(rank, "zero", flip_every_weight)
    return runs


@pytest.mark.distributed
def test_a_wrong_update_convicts_its_rank_and_no_optimizer_is_accused_of_itself(run_ranks: RunRanks) -> None:
    results = run_ranks(all_runs, RANKS)
    for name in OPTIMIZERS:
        if name == "wrong":
            continue
        assert [result[name]["alarm"] for result in results] == [None] * RANKS, name
        repeatable = name != "mixes tensors"
        assert [result[name]["enabled"] for result in results] == [repeatable] * RANKS, name
        assert [result[name]["passed"] for result in results] == [3 if repeatable else None] * RANKS, name
        assert [result[name]["left_out"] for result in results] == [[]] * RANKS, name
        assert len({result[name]["weights"] for result in results}) == 1
    for name, check in CONVICTED_BY.items():
        documents = [result[name]["alarm"] for result in results]
        assert documents[0] is not None, f"{name} was not seen"
        assert documents.count(documents[0]) == RANKS
        alarm = Alarm.from_json(documents[0])
        assert (alarm.check, alarm.step) == (check, 1), name
        assert (alarm.verdict.kind, alarm.suspect_ranks) == ("conclusive", (FAULTY,)), name
        assert len(alarm.evidence.get("sampled_tensors", [])) == (4 if check == "update_replay" else 0)
    for name in ("clamp", "wrong weight, zero"):
        assert [result[name]["alarm"] for result in results] == [None] * RANKS, name
        assert [result[name]["enabled"] for result in results] == [True] * RANKS, name
        assert [result[name]["passed"] for result in results] == [3] * RANKS, name
        assert len({result[name]["weights"] for result in results}) == 1
    assert [result["clamp"]["left_out"] for result in results] == [[CLAMPED]] * RANKS
    left_out = [result["wrong weight, zero"]["left_out"] for result in results]
    assert len(left_out[0]) == 4
    assert left_out.count(left_out[0]) == RANKS


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("zero", "mixes tensors", "wrong")])
def test_a_replayed_update_equals_the_real_one_and_touches_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(33, 17)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        model(torch.randn(5, 33)).square().sum().backward()
        parameters = dict(model.named_parameters())
        tensors = {
            name: {
                "weight": parameter.detach().clone(),
                "gradient": parameter.grad.clone(),  # type: ignore[union-attr]
                "state": update_replay._copy(optimizer.state.get(parameter, {})),
                "group": 0,
            }
            for name, parameter in parameters.items()
        }
        groups = {0: {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}}
        before = update_replay._fingerprint(optimizer, parameters)
        replayed = replay_update(optimizer, tensors, groups)
        assert update_replay._fingerprint(optimizer, parameters) == before
        optimizer.step()
        assert replayed == update_replay._fingerprint(optimizer, parameters) != before
        optimizer.zero_grad()
