"""Fingerprints: one value whatever the layout, chunking and path; and no change of one or two words is missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from truestep.fingerprint import (
    Fingerprint,
    combine,
    fingerprint_model,
    fingerprint_nested,
    fingerprint_optimizer,
    fingerprint_tensor,
    fingerprint_tensors,
    named_state,
)
from truestep.fingerprint.eager import eager_sums
from truestep.fingerprint.native import NativeKernel
from truestep.fingerprint.reference import fingerprint_bytes
from truestep.fingerprint.sums import fmix64

VECTORS = json.loads((Path(__file__).parent / "fingerprint_vectors.json").read_text())
NATIVE = NativeKernel(build_after_bytes=0)
Sums = Callable[[list[torch.Tensor]], torch.Tensor]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def from_words(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def native(raws: list[torch.Tensor]) -> torch.Tensor:
    """The compiled kernel, which must build wherever there is a C compiler: the development machine and CI have one."""
    if not NATIVE.build() and NATIVE.reason.startswith("no C compiler"):
        pytest.skip(NATIVE.reason)
    sums = NATIVE.sums(raws)
    assert sums is not None, NATIVE.reason
    return sums


def eager(raws: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([eager_sums(raw) for raw in raws])


def settled(sums: torch.Tensor, datas: list[bytes]) -> list[Fingerprint]:
    return [Fingerprint.from_sums(*row, length_bytes=len(data)) for row, data in zip(sums.tolist(), datas, strict=True)]


both_paths = pytest.mark.parametrize("path", [eager, native], ids=lambda path: path.__name__)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_stored_vectors_do_not_change(vector: dict[str, str]) -> None:
    data = bytes.fromhex(vector["hex"])
    assert str(fingerprint_bytes(data)) == vector["fingerprint"]
    assert str(fingerprint_tensor(torch.tensor(list(data), dtype=torch.uint8))) == vector["fingerprint"]


@both_paths
def test_stored_vectors_on_every_path(path: Sums) -> None:
    datas = [bytes.fromhex(vector["hex"]) for vector in VECTORS]
    sums = path([torch.tensor(list(data), dtype=torch.uint8) for data in datas])
    assert [str(value) for value in settled(sums, datas)] == [vector["fingerprint"] for vector in VECTORS]


def test_the_mix_is_murmur3s_finalizer() -> None:
    """Known values of murmur3's fmix64."""
    assert fmix64(0) == 0
    assert fmix64(1) == 0xB456BCFC34C2CB2C


@given(data=st.binary(max_size=200), chunk=st.integers(1, 30))
def test_every_chunking_gives_the_definitions_value(data: bytes, chunk: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert settled(eager_sums(tensor, chunk_pairs=chunk)[None], [data]) == [fingerprint_bytes(data)]


@both_paths
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_and_odd_size_gives_the_definitions_value(path: Sums, dtype: torch.dtype) -> None:
    tensors = [torch.randint(0, 2, (size,)).to(dtype) for size in (0, 1, 2, 3, 7, 33)]
    datas = [raw_bytes(tensor) for tensor in tensors]
    assert settled(path([tensor.view(torch.uint8) for tensor in tensors]), datas) == [
        fingerprint_bytes(data) for data in datas
    ]


@both_paths
@given(data=st.binary(max_size=200), offset=st.integers(0, 9))
def test_any_bytes_at_any_alignment_give_the_definitions_value(path: Sums, data: bytes, offset: int) -> None:
    raw = torch.tensor([*bytes(offset), *data], dtype=torch.uint8)[offset:]
    assert settled(path([raw]), [data]) == [fingerprint_bytes(data)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_and_offsets_do_not_matter(dtype: torch.dtype) -> None:
    base = torch.randn(9, 7).to(dtype)
    for view in (base.t(), base[1:, 1:], base[::2], base.flatten()[1:], base[3], base[3, 2], base.expand(2, 9, 7)):
        assert fingerprint_tensor(view) == fingerprint_bytes(raw_bytes(view))


def test_large_tensors_are_the_same_in_chunks_at_once_and_compiled() -> None:
    raw = torch.randn(200_003).view(torch.uint8)
    expected = eager_sums(raw, chunk_pairs=1 << 20)
    assert torch.equal(eager_sums(raw), expected)
    assert torch.equal(native([raw])[0], expected)


def test_a_table_of_tensors_names_each_ones_own_value() -> None:
    table = {f"tensor {size}": torch.randn(size) for size in range(1, 40)}
    assert fingerprint_tensors(table) == {name: str(fingerprint_tensor(tensor)) for name, tensor in table.items()}
    assert fingerprint_tensors({}) == {}


words = st.integers(0, 2**32 - 1)


@settings(max_examples=200)
@given(data=st.data(), values=st.lists(words, min_size=1, max_size=40))
def test_any_change_of_one_or_two_words_moves_a_linear_sum(data: st.DataObject, values: list[int]) -> None:
    changed = list(values)
    for _ in range(2):
        index = data.draw(st.integers(0, len(values) - 1))
        changed[index] = data.draw(words)
    before, after = fingerprint_tensor(from_words(values)), fingerprint_tensor(from_words(changed))
    if changed == values:
        assert before == after
    else:
        assert (before.plain, before.position) != (after.plain, after.position)
        assert (
            before.mix != after.mix or [a ^ b for a, b in zip(values, changed, strict=True)].count(0) < len(values) - 1
        )


@given(start=st.integers(0, 60), stride=st.sampled_from([1, 2, 8]), bit=st.integers(0, 31))
def test_equal_and_opposite_flips_that_both_linear_sums_miss_are_seen_by_the_mix(
    start: int, stride: int, bit: int
) -> None:
    """Signs + - - + at equal distances: the plain and the position-weighted sum cancel."""
    positions = [start + k * stride for k in range(4)]
    values = [0] * 128
    values[positions[1]] = values[positions[2]] = 1 << bit
    flipped = list(values)
    for position in positions:
        flipped[position] ^= 1 << bit
    before, after = fingerprint_tensor(from_words(values)), fingerprint_tensor(from_words(flipped))
    assert (before.plain, before.position) == (after.plain, after.position), "the pattern must hit the hole"
    assert before.mix != after.mix


def test_values_that_compare_equal_but_differ_in_bits_differ() -> None:
    assert fingerprint_tensor(torch.tensor([0.0])) != fingerprint_tensor(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint_tensor(payloads[:1]) != fingerprint_tensor(payloads[1:])


def test_trailing_zeros_and_swaps_are_seen() -> None:
    sizes = [fingerprint_tensor(torch.zeros(n, dtype=torch.uint8)) for n in range(20)]
    assert len(set(sizes)) == 20
    assert fingerprint_tensor(from_words([1, 2, 3])) != fingerprint_tensor(from_words([2, 1, 3]))


def test_printed_form_reads_back_and_another_version_is_refused() -> None:
    value = fingerprint_tensor(torch.randn(5))
    assert Fingerprint.parse(str(value)) == value
    assert str(value).startswith("v1:")
    with pytest.raises(ValueError, match="format v1"):
        Fingerprint.parse("v2:" + "0" * 48)


def test_sparse_tensors_are_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="values and indices"):
        fingerprint_tensor(torch.eye(3).to_sparse())


def test_combination_depends_on_names_and_values_and_not_on_order() -> None:
    table = {"a": "v1:1", "b": "v1:2"}
    assert combine(table) == combine(dict(reversed(table.items())))
    assert len({combine(table), combine({"a": "v1:2", "b": "v1:1"}), combine({"a": "v1:1"}), combine({})}) == 4


def test_model_fingerprint_covers_parameters_and_buffers_but_not_running_statistics() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.register_buffer("table", torch.ones(2))
    assert set(named_state(module)) == {"0.weight", "0.bias", "1.weight", "1.bias", "table"}
    before, _ = fingerprint_model(module)
    module(torch.randn(4, 3))
    assert fingerprint_model(module)[0] == before
    module.get_buffer("table")[1] = 1.0000001
    assert fingerprint_model(module)[0] != before


def test_optimizer_fingerprint_sees_state_steps_and_hyperparameters() -> None:
    def stepped(count: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(count):
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return module, optimizer

    seen = [fingerprint_optimizer(optimizer, module)[0] for module, optimizer in map(stepped, range(3))]
    assert len(set(seen)) == 3
    module, optimizer = stepped(2)
    assert fingerprint_optimizer(optimizer, module)[0] == seen[2]
    optimizer.param_groups[0]["lr"] = 0.2
    assert fingerprint_optimizer(optimizer, module)[0] != seen[2]
    module, optimizer = stepped(2)
    optimizer.state[module.weight]["exp_avg_sq"].view(torch.int32)[0, 0] ^= 1
    combined, table = fingerprint_optimizer(optimizer, module)
    assert combined != seen[2]
    assert "weight/exp_avg_sq" in table


def test_code_in_an_optimizers_settings_counts_by_its_name_and_data_beside_it_by_its_bits() -> None:
    class Warmup:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    def fingerprint(rank: int, factor: float = 0.5, mask: float = 1.0) -> str:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        code = {"schedule": lambda step: factor * step, "warmup": Warmup(rank), "device": torch.device("cuda", rank)}
        data = {"steps": [lambda: 0, {"factor": factor}], "masks": [torch.full((9,), mask)], "tags": {"a", "b"}}
        optimizer.param_groups[0].update(code | data)
        return fingerprint_optimizer(optimizer)[0]

    assert fingerprint(0) == fingerprint(1), "every rank has its own function, object and device"
    assert fingerprint(0, factor=0.25) != fingerprint(0)
    assert fingerprint(0, mask=1.0 + 2**-20) != fingerprint(0), "its repr has four digits"


def test_lists_of_integers_differ_by_every_integer_and_by_structure() -> None:
    values = [[], [1, 2], [2, 1], [12], [1, [2]], [[1], 2], [1, 2, 0], [1, True], ["1", 2], {"0": 1, "1": 2}]
    assert len({fingerprint_nested(value) for value in values}) == len(values)
    assert fingerprint_nested([1, 2]) == fingerprint_nested((1, 2))


def test_one_bit_of_any_tensor_and_the_order_of_tensors_change_a_batchs_fingerprint() -> None:
    def batch(*flips: int) -> dict[str, Any]:
        tensors = [torch.arange(6.0) + 10 * place for place in range(3)]
        for place in flips:
            tensors[place].view(torch.int32)[4] ^= 1
        return {"first": tensors[0], "rest": (tensors[1], [tensors[2]])}

    whole = batch()
    swapped = {"first": whole["rest"][0], "rest": (whole["first"], whole["rest"][1])}
    prints = [fingerprint_nested(value) for value in (whole, batch(0), batch(1), batch(2), batch(0, 1), swapped)]
    assert len(set(prints)) == len(prints)
    assert fingerprint_nested(batch()) == prints[0]


def test_batches_differ_by_structure_dtype_and_bits() -> None:
    base = {"tokens": torch.ones(2), "mask": [True, None]}
    others = [
        {"tokens": torch.ones(2, dtype=torch.float64), "mask": [True, None]},
        {"tokens": torch.ones(2, 1), "mask": [True, None]},
        {"tokens": torch.ones(2), "mask": [False, None]},
        {"mask": [True, None]},
        torch.ones(2),
    ]
    assert fingerprint_nested(base) == fingerprint_nested({"tokens": torch.ones(2), "mask": [True, None]})
    prints = [fingerprint_nested(value) for value in [base, *others]]
    assert all(a != b for a, b in pairwise(sorted(prints)))


class Slotted:
    __slots__ = ("__hidden", "seen", "unset")

    def __init__(self, seen: Any, hidden: int = 0) -> None:
        self.seen = seen
        self.__hidden = hidden


class Text(str):
    """Text that may have attributes."""


def test_arrays_slots_and_subclasses_of_text_differ_by_every_element() -> None:
    array = np.zeros((4000, 2), dtype=np.float32)
    changed = array.copy()
    changed[2000, 1] = 1
    values = [
        *(array, changed, array.astype(np.float64), array.reshape(2, 4000), array.view(np.int32)),
        *(np.array([1, None], dtype=object), np.array([1, "a"], dtype=object), np.float32(1), np.float64(1)),
        *(Slotted(1), Slotted(2), Slotted(1, hidden=1), Slotted(array), Slotted(changed)),
        *(Text("a"), Text("b"), deque([array]), deque([changed]), len, print, {1}, {2}, {1, 2}),
    ]
    assert len({fingerprint_nested(value) for value in values}) == len(values)
    assert fingerprint_nested(np.asfortranarray(changed)) == fingerprint_nested(changed)
    assert fingerprint_nested(Slotted(array)) == fingerprint_nested(Slotted(array.copy()))


def test_sets_and_paths_are_the_same_in_every_process() -> None:
    code = (
        "import pathlib; from truestep.fingerprint import fingerprint_nested as f; p = pathlib.Path('a/b'); hash(p); "
        "print(f([{f'doc{i}' for i in range(9)}, p, frozenset({('a', 1), ('b', 2)})]))"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_a_value_that_shows_only_its_address_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"\.images\[1\] is a builtins\.object"):
        fingerprint_nested({"images": [torch.ones(1), object()]})
