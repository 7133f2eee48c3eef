"""A table's word, and the kernel's single pass for sums and NaN: shortcuts that may not miss what the long way sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.fingerprint import combine, fingerprint_tensor, fingerprint_tensors
from truestep.fingerprint.native import NativeKernel
from truestep.fingerprint.sums import Fingerprint

NAMES = st.text(alphabet="ab.\0", max_size=4)
LEAVES = st.one_of(
    NAMES,
    st.lists(st.integers(0, 255), max_size=9).map(lambda values: torch.tensor(values, dtype=torch.uint8)),
)


@given(one=st.dictionaries(NAMES, LEAVES, max_size=4), other=st.dictionaries(NAMES, LEAVES, max_size=4))
@settings(derandomize=True, max_examples=300)
def test_words_are_equal_exactly_where_the_printed_tables_are(
    one: dict[str, torch.Tensor | str], other: dict[str, torch.Tensor | str]
) -> None:
    first, second = fingerprint_tensors(one), fingerprint_tensors(other)
    assert first.word == fingerprint_tensors(dict(reversed(one.items()))).word
    kinds = [{name: isinstance(leaf, str) for name, leaf in leaves.items()} for leaves in (one, other)]
    assert (first.word == second.word) == (dict(first) == dict(second) and kinds[0] == kinds[1])


@given(one=st.dictionaries(NAMES, LEAVES, max_size=4), other=st.dictionaries(NAMES, LEAVES, max_size=4))
@settings(derandomize=True, max_examples=300)
def test_what_changed_since_another_table_is_what_is_printed_differently(
    one: dict[str, torch.Tensor | str], other: dict[str, torch.Tensor | str]
) -> None:
    for later in (other, {**one, **{name: other[name] for name in one.keys() & other.keys()}}):
        first, second = fingerprint_tensors(one), fingerprint_tensors(later)
        assert sorted(second.changed_since(first)) == sorted(n for n in second if second[n] != first.get(n))


def test_a_bit_a_name_a_length_and_a_text_move_the_word() -> None:
    def word(name: str = "b", bit: int = 0, zeros: int = 4, text: str = "0.1") -> int:
        tensor = torch.zeros(zeros, dtype=torch.int32)
        tensor[0] = bit
        return fingerprint_tensors({"a": torch.ones(3), name: tensor, "group 0/lr": text}).word

    words = [word(), word(name="c"), word(bit=1), word(zeros=5), word(text="0.2")]
    assert len(set(words)) == len(words)
    assert all(-(2**63) <= value < 2**63 for value in words)


def test_what_was_measured_stays_although_the_tensors_go_on() -> None:
    """An alarm or a checkpoint prints the table later than the word was compared."""
    weights = {"b": torch.ones(70), "a": torch.zeros(3)}
    table = fingerprint_tensors(weights)
    expected = {name: str(fingerprint_tensor(tensor)) for name, tensor in weights.items()}
    weights["b"].add_(1)
    assert dict(table) == expected
    assert table.combined == combine(expected)
    assert (len(table), list(table)) == (2, ["a", "b"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 5, 255, 256, 257, 4099])
def test_one_pass_gives_the_sums_and_finds_every_nan(dtype: torch.dtype, size: int) -> None:
    """Sizes around the blocks in which the kernel works."""
    kernel = NativeKernel()
    if not kernel.build():
        pytest.skip(kernel.reason)
    tensor = torch.randn(size + 1, generator=torch.Generator().manual_seed(size)).to(dtype)[1:]
    for place in sorted({-1, 0, size // 2, size - 1} & set(range(-1, size))):
        changed = tensor.clone()
        if place >= 0:
            changed[place] = float("nan") if place % 2 else float("inf")
        seen = kernel.look(changed)
        assert seen is not None
        assert seen[0] == (place >= 0)
        assert kernel.nonfinite(changed) == (place >= 0)
        assert Fingerprint.from_sums(*seen[1], length_bytes=changed.nbytes) == fingerprint_tensor(changed)


def test_the_kernel_looks_at_nothing_that_it_cannot_read() -> None:
    kernel = NativeKernel()
    if not kernel.build():
        pytest.skip(kernel.reason)
    assert kernel.look(torch.ones(4, dtype=torch.int32)) is None
    assert kernel.look(torch.ones(4, 4).t()[:, :2]) is None
