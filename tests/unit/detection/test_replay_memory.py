"""A replay holds one gradient at a time, whatever the model's depth, and a sparse one is never made dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from truestep import rng
from truestep.replay import GradientRecorder, PassInputs, replay

WIDTH = 512
"""A layer of 1 MiB: the fingerprint's scratch of a quarter of that does not count."""
LAYER_BYTES = 4 * WIDTH * WIDTH
DEPTH = 8


class LiveMemory(TorchDispatchMode):
    """Sums the storages of at least `smallest` bytes that operators made and that still live."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.peak_bytes: int = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((arguments, keywords or {}))}
        result = function(*arguments, **(keywords or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.smallest and storage._cdata not in given:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [] if value.is_sparse else [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def mean_square(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def replay_peak(module: nn.Module, batch: Tensor, smallest: int) -> int:
    inputs = PassInputs(batch=batch, rng=rng.capture(), buffers={})
    replay(module, inputs, mean_square)  # fills what is cached once a process
    with LiveMemory(smallest) as memory:
        result = replay(module, inputs, mean_square)
    assert all(result.gradients.values())
    return memory.peak_bytes


def deep_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def test_no_more_than_one_gradient_lives_at_a_time() -> None:
    peak = replay_peak(deep_model(), torch.randn(2, WIDTH), LAYER_BYTES)
    assert LAYER_BYTES <= peak < 2 * LAYER_BYTES, f"{peak / LAYER_BYTES:.1f} gradients of {DEPTH} lived at once"


def test_the_measure_sees_gradients_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.replay._drop_gradient", lambda _leaf: None)
    assert replay_peak(deep_model(), torch.randn(2, WIDTH), LAYER_BYTES) >= DEPTH * LAYER_BYTES


def test_recording_a_pass_keeps_no_copy_of_a_gradient() -> None:
    module = deep_model()
    recorder = GradientRecorder(dict(module.named_parameters()))
    with LiveMemory(LAYER_BYTES) as memory:
        mean_square(module, torch.randn(2, WIDTH)).backward()  # type: ignore[no-untyped-call]
    gradients, _ = recorder.close()
    assert len(gradients) == 2 * DEPTH
    assert memory.peak_bytes == DEPTH * LAYER_BYTES, "the .grad of every layer, and nothing beside"


def test_a_sparse_gradient_is_hashed_as_it_is() -> None:
    head = nn.Linear(16, 1)
    module = nn.Sequential(nn.Embedding(100_000, 16, sparse=True), head)
    batch = torch.tensor([[3, 5, 3, 99_999]])
    assert replay_peak(module, batch, 100_000 * 16) == 0, "something of the table's size was made"
    inputs = PassInputs(batch=batch, rng=rng.capture(), buffers={})
    before = replay(module, inputs, mean_square)
    with torch.no_grad():
        head.weight[0, 7] += 1e-3
    after = replay(module, inputs, mean_square)
    assert before.gradients["0.weight"][0] == after.gradients["0.weight"][0], "the same rows"
    assert before.gradients["0.weight"][1] != after.gradients["0.weight"][1], "other values"
