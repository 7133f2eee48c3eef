"""A sum that is wrong and that every rank received alike is seen, and a right one never is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import scenarios
from tests.distributed.conftest import RunRanks
from truestep.attachment import attach
from truestep.checks.reduction import BLOCK, Rounding, block_sums, random_signs, rounding_of
from truestep.contract import Alarm
from truestep.guard import CorruptionDetected, Guard
from truestep.inject import Fault, arm
from truestep.schedule import Schedule

RANKS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train_alike_faulty(
    rank: int, dtype: str, fault: dict[str, Any] | None, *, hook: Any = None, only: int | None = None, **schedule: Any
) -> dict[str, Any]:
    """Train a few steps; the reduced gradient is corrupted on every rank alike, or on rank `only`."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(scenarios.Transformer().to(DTYPES[dtype]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    attach(ddp, comm_hook=hook)
    torch.manual_seed(100 + rank)
    armed = arm(ddp, optimizer, Fault.from_json(fault)) if fault and only in (None, rank) else None
    periods = Schedule(**{"audit_every": 4, "check_every": 4, **schedule})
    guard = Guard(ddp, optimizer, periods, compute_loss=scenarios.next_token_loss)
    alarm: Alarm | None = None
    try:
        for step in range(8):
            optimizer.zero_grad(set_to_none=True)
            batch = scenarios.micro_batch(step, rank)
            guard.start_step(step, batch)
            loss = scenarios.next_token_loss(ddp, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            guard.before_update(loss)
            optimizer.step()
            guard.after_update()
    except CorruptionDetected as detected:
        alarm = detected.alarm
    return {"alarm": None if alarm is None else alarm.to_json(), "firings": armed.firings if armed else 0}


WRONG = {"site": "reduced_gradient", "target": "0", "element": 700}
CASES: dict[str, dict[str, Any]] = {
    "clean float32": {"dtype": "float32", "fault": None, "reduction_every": 1},
    "clean bfloat16": {"dtype": "bfloat16", "fault": None, "reduction_every": 1},
    "clean, compressed": {"dtype": "float32", "fault": None, "reduction_every": 1, "hook": "fp16"},
    "float32 exponent": {"dtype": "float32", "fault": {**WRONG, "bit": 27, "first_step": 1}},
    "float32 mantissa, every step": {"dtype": "float32", "fault": {**WRONG, "bit": 20}, "reduction_every": 1},
    "float32, run of 8 nulled": {"dtype": "float32", "fault": {**WRONG, "model": "null", "elements": 8}},
    "float32 lowest bit": {"dtype": "float32", "fault": {**WRONG, "bit": 0}},
    "bfloat16, 100 times": {"dtype": "bfloat16", "fault": {**WRONG, "model": "relative", "magnitude": 99.0}},
    "one rank only": {"dtype": "float32", "fault": {**WRONG, "bit": 0}, "only": 1},
}


def all_cases(rank: int) -> dict[str, Any]:
    """Every case, in one process group."""
    hooks = {None: None, "fp16": (None, default_hooks.fp16_compress_hook)}
    return {name: train_alike_faulty(rank, **{**case, "hook": hooks[case.get("hook")]}) for name, case in CASES.items()}


@pytest.mark.distributed
def test_wrong_sums_are_seen_located_and_blamed_on_nobody_and_right_ones_pass(run_ranks: RunRanks) -> None:
    results = run_ranks(all_cases, RANKS)
    alarms = {}
    for name, case in CASES.items():
        documents = [result[name]["alarm"] for result in results]
        assert documents.count(documents[0]) == RANKS, f"{name}: ranks disagree"
        alarms[name] = None if documents[0] is None else Alarm.from_json(documents[0])
        if case["fault"]:
            assert results[1][name]["firings"] > 0, f"{name} never fired"

    for name in ("clean float32", "clean bfloat16", "clean, compressed", "float32 lowest bit"):
        assert alarms[name] is None, f"{name}: a sum within its rounding raised an alarm"
    for name, step in {
        "float32 exponent": 3,
        "float32 mantissa, every step": 0,
        "float32, run of 8 nulled": 3,
        "bfloat16, 100 times": 3,
    }.items():
        alarm = alarms[name]
        assert alarm is not None, f"{name} was not seen"
        assert (alarm.check, alarm.step, alarm.verdict.rule) == ("reduction", step, "reduction_wrong_sum"), name
        assert (alarm.verdict.kind, alarm.suspect_ranks) == ("ambiguous", ())
        assert alarm.evidence["first"][0]["element"] == 700
        assert alarm.evidence["elements"] == (8 if "8" in name else 1)
        assert len(alarm.evidence["first"][0]["local"]) == RANKS
    unequal = alarms["one rank only"]
    assert unequal is not None
    assert (unequal.verdict.rule, unequal.step) == ("reduction_unequal", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_no_correct_sum_exceeds_its_bound_in_any_order(dtype: torch.dtype, ranks: int) -> None:
    """Values over many magnitudes with cancellation: the case in which relative errors of a sum explode."""
    generator = torch.Generator().manual_seed(ranks)
    rounding = rounding_of(None, dtype)
    assert rounding is not None
    relative, absolute = rounding.element_bound(ranks)
    spread = torch.randn(ranks, 20_000, generator=generator).mul_(3).exp2_()
    local = (torch.randn(ranks, 20_000, generator=generator) * spread * 1e-3).to(dtype)
    for order in (list(range(ranks)), torch.randperm(ranks, generator=generator).tolist()):
        total = torch.zeros_like(local[0])
        for rank in order:
            total = total + local[rank] * (1.0 / ranks)
        error = (total.double() - local.double().mean(dim=0)).abs()
        bound = relative * local.double().abs().mean(dim=0) + absolute
        assert bool((error <= bound).all())
        # And the bound is no barn door: one wrong contribution of common size exceeds it nearly always.
        wrong = (total.double() + local[0].double() / ranks - local.double().mean(dim=0)).abs()
        if ranks <= 8:
            assert float((wrong > bound).double().mean()) > (0.99 if dtype is torch.float32 else 0.4)


@pytest.mark.parametrize("elements", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3, 70 * BLOCK])
def test_block_sums_are_those_of_the_definition(elements: int) -> None:
    buffer = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    signs = random_signs(3, 0)
    found = block_sums(buffer, signs)
    for number, values in enumerate(buffer.double().split(BLOCK)):
        expected = torch.stack([(values * signs[: len(values)]).sum(), values.square().sum()])
        assert torch.allclose(found[number], expected, rtol=1e-12, atol=1e-12)
    assert len(found) == -(-elements // BLOCK)


def test_signs_differ_between_steps_and_buckets_and_hooks_that_do_not_sum_are_left_alone() -> None:
    assert not torch.equal(random_signs(1, 0), random_signs(2, 0))
    assert not torch.equal(random_signs(1, 0), random_signs(1, 1))
    assert set(random_signs(1, 0).tolist()) == {-1.0, 1.0}
    assert rounding_of(lambda state, bucket: None, torch.float32) is None
    compressed = rounding_of(default_hooks.bf16_compress_hook, torch.float32)
    assert compressed == Rounding(unit=2.0**-8, smallest=torch.finfo(torch.bfloat16).smallest_normal)


def test_the_bound_grows_with_ranks_and_shrinks_with_precision() -> None:
    fine, coarse = rounding_of(None, torch.float32), rounding_of(None, torch.bfloat16)
    assert fine is not None
    assert coarse is not None
    assert fine.element_bound(4)[0] == pytest.approx(5 * 2.0**-24)
    assert coarse.element_bound(4)[0] == pytest.approx(5 * 2.0**-8 / (1 - 5 * 2.0**-8))
    assert fine.element_bound(64)[0] > fine.element_bound(4)[0]
