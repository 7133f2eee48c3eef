"""A replay repeats a pass bit for bit and leaves no trace in the process that runs it."""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from truestep import rng
from truestep.checks.recording import PassRecording
from truestep.fingerprint import fingerprint_model
from truestep.replay import PassInputs, PassResult, replay


class Checkpointed(nn.Module):
    """Activation checkpointing around a block with dropout."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, self.first(inputs), use_reentrant=self.reentrant)
        return result


class Tied(nn.Module):
    """One weight used twice, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.embedding(inputs)).relu())
        return result


class DrawsEverywhere(nn.Module):
    """Uses every generator that a training step may draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        scale = random.random() + float(numpy.random.rand()) + float(torch.rand(()))  # noqa: S311 - the global ones
        result: Tensor = self.layer(inputs) * scale
        return result


MODULES: dict[str, Any] = {
    "reentrant checkpointing": lambda: Checkpointed(reentrant=True),
    "checkpointing": lambda: Checkpointed(reentrant=False),
    "tied weights and batch norm": Tied,
    "python, numpy and torch random numbers": DrawsEverywhere,
    "frozen parameter": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)),
}


def square_loss(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def autocast_loss(model: Any, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return square_loss(model, batch).float()


def record(module: nn.Module, batch: Tensor, compute_loss: Any = square_loss) -> tuple[PassInputs, PassResult]:
    recording = PassRecording(module, batch, audited=True, loss_scale=1.0)
    loss = compute_loss(module, batch)
    loss.backward()
    recording.finish(loss)
    assert recording.result is not None
    return recording.inputs(), recording.result


def trace(module: nn.Module) -> list[Any]:
    """Everything that a replay must leave alone."""
    gradients = [None if p.grad is None else p.grad.clone().tolist() for p in module.parameters()]
    buffers = {name: buffer.tolist() for name, buffer in module.named_buffers()}
    return [fingerprint_model(module), gradients, buffers, rng.capture().fingerprint()]


@pytest.mark.parametrize("compute_loss", [square_loss, autocast_loss], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODULES)
def test_replay_repeats_loss_and_every_local_gradient_and_leaves_no_trace(name: str, compute_loss: Any) -> None:
    torch.manual_seed(3)
    module, batch = MODULES[name](), torch.randn(4, 8, requires_grad=True)
    inputs, recorded = record(module, batch.detach().requires_grad_(), compute_loss)
    shipped = PassInputs.from_bytes(inputs.to_bytes())
    assert shipped.fingerprint() == inputs.fingerprint()
    # The replayer's own streams and running statistics are elsewhere than the producer's.
    random.random()  # noqa: S311
    torch.rand(3)
    module(torch.randn(4, 8, requires_grad=True))
    before = trace(module)

    again = replay(module, shipped, compute_loss)

    assert (again.loss, again.gradients) == (recorded.loss, recorded.gradients)
    assert recorded.gradients, "nothing was compared"
    assert trace(module) == before


def test_a_weight_shared_by_two_reentrant_segments_contributes_one_fingerprint_each() -> None:
    """Each segment has a backward of its own, so two gradients arrive; `.grad` would hold partial sums in between."""

    class Shared(Checkpointed):
        def forward(self, inputs: Tensor) -> Tensor:
            first = checkpoint(self.block, self.first(inputs), use_reentrant=True)
            result: Tensor = checkpoint(self.block, first, use_reentrant=True)
            return result

    module = Shared(reentrant=True)
    inputs, recorded = record(module, torch.randn(4, 8))
    assert {name: len(values) for name, values in recorded.gradients.items()} == {
        "first.weight": 1,
        "first.bias": 1,
        "block.0.weight": 2,
        "block.0.bias": 2,
    }
    assert replay(module, inputs, square_loss).gradients == recorded.gradients


def test_gradients_of_a_micro_batch_are_seen_under_accumulation() -> None:
    """`.grad` already holds a sum when the recorded micro-batch comes."""
    module = Tied()
    square_loss(module, torch.randn(4, 8)).backward()  # type: ignore[no-untyped-call]
    inputs, recorded = record(module, torch.randn(4, 8))
    again = replay(module, inputs, square_loss)
    assert again.gradients == recorded.gradients


def test_another_random_state_or_batch_or_weight_gives_another_result() -> None:
    """The comparison can fail: each thing that travels matters."""
    module = Checkpointed(reentrant=False)
    inputs, recorded = record(module, torch.randn(4, 8))
    torch.rand(1)
    moved = PassInputs(batch=inputs.batch, rng=rng.capture(), buffers=inputs.buffers)
    assert replay(module, moved, square_loss).gradients != recorded.gradients
    other = PassInputs(batch=inputs.batch + 1e-6, rng=inputs.rng, buffers=inputs.buffers)
    assert replay(module, other, square_loss).gradients != recorded.gradients
    assert len({value.fingerprint() for value in (inputs, moved, other)}) == 3
    with torch.no_grad():
        module.first.weight.view(torch.int32)[0, 0] ^= 1 << 20
    assert replay(module, inputs, square_loss).gradients != recorded.gradients


def test_a_loss_that_uses_the_wrapper_and_one_that_writes_into_its_batch_replay_too() -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with model.no_sync():
            value: Tensor = model.module(batch.pop("inputs")).square().mean()
            return value

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def no_sync(self) -> Any:
            return torch.enable_grad()

    module = nn.Linear(8, 8)
    batch = {"inputs": torch.randn(2, 8)}
    recording = PassRecording(module, batch, audited=True, loss_scale=1.0)
    value = loss(Wrapper(module), batch)
    value.backward()  # type: ignore[no-untyped-call]
    recording.finish(value)
    assert recording.result is not None
    data = recording.inputs().to_bytes()
    for _ in range(2):
        assert replay(module, PassInputs.from_bytes(data), loss).gradients == recording.result.gradients


def test_random_numbers_are_put_back_when_the_replayed_pass_raises() -> None:
    module = nn.Linear(8, 8)
    inputs, _ = record(module, torch.randn(4, 8))
    torch.rand(2)
    before = rng.capture().fingerprint()

    def raises(model: Any, batch: Tensor) -> Tensor:
        torch.rand(5)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        replay(module, inputs, raises)
    assert rng.capture().fingerprint() == before


def test_running_statistics_are_recorded_as_they_were_before_each_forward() -> None:
    """The native batch norm changes them without raising their version."""
    module = nn.BatchNorm1d(8)
    first, _ = record(module, torch.randn(4, 8))
    second, _ = record(module, torch.randn(4, 8))
    assert first.buffers["running_mean"].tolist() == [0.0] * 8
    assert second.buffers["running_mean"].tolist() != [0.0] * 8
    assert torch.equal(second.buffers["num_batches_tracked"], torch.tensor(1))


class Remembers(nn.Module):
    """Keeps Python state in its forward, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0
        self.last: Tensor | None = None
        self.history: list[Any] = [torch.ones(3), {"seen": deque([1, 2], maxlen=2), "names": {"a"}}]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.history[1]["seen"].append(self.calls)
        self.history[1]["names"].add(str(self.calls))
        self.history[1]["last"] = self.last = self.inner(inputs)
        self.cached = self.calls
        return self.last * (1.0 if self.calls < 3 else 0.5)


@pytest.mark.parametrize("fails", [False, True])
def test_python_attributes_are_put_back_after_a_replay(*, fails: bool) -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).square().mean()
        if fails:
            raise RuntimeError("out of memory")
        return value

    module = Remembers()
    inputs, _ = record(module, torch.randn(4, 8))
    del module.cached
    history, last = module.history, module.last
    elsewhere, before = history[1]["seen"], list(history)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        for _ in range(3):
            replay(module, inputs, loss)
    assert module.calls == 1
    assert module.last is last
    assert not hasattr(module, "cached")
    assert module.history is history
    assert all(now is then for now, then in zip(history, before, strict=True))
    assert history[1]["seen"] is elsewhere
    assert list(elsewhere) == [2, 1]
    assert history[1]["names"] == {"a", "1"}
    assert history[1]["last"] is last
