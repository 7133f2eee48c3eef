"""One flipped bit is read off two fingerprints and told from every other change; and what is held against a rank."""

from __future__ import annotations

import random

import pytest
import torch

from truestep.checks.constant_buffers import flipped_alone
from truestep.fingerprint import Flip, fingerprint_tensor, flipped_bit

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.int16, torch.complex64]


def _data(dtype: torch.dtype, elements: int) -> torch.Tensor:
    raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def _flipped(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    # As bytes: copying bools makes every value that is not 0 a 1.
    changed = tensor.view(torch.uint8).clone()
    changed[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return changed.view(tensor.dtype)


def _bits(tensor: torch.Tensor, element: int) -> int:
    return int.from_bytes(bytes(tensor.reshape(-1)[element : element + 1].view(torch.uint8).tolist()), "little")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_is_found_whichever_of_the_two_the_tensor_holds(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for elements in (1, 2, 7, 33):
        before = _data(dtype, elements)
        for element in {0, elements // 2, elements - 1}:
            for bit in range(8 * dtype.itemsize):
                after = _flipped(before, element, bit)
                one, other = fingerprint_tensor(before), fingerprint_tensor(after)
                expected = Flip(
                    element=element, bit=bit, bits=_bits(after, element), bits_before=_bits(before, element)
                )
                assert flipped_bit(before, one, other) == expected
                assert flipped_bit(after, one, other) == expected


def test_a_tensor_of_another_order_in_memory_is_read_in_its_own() -> None:
    before = torch.arange(12.0).reshape(3, 4).t()
    after = before.clone(memory_format=torch.preserve_format)
    after[1, 2] = -after[1, 2]
    found = flipped_bit(after, fingerprint_tensor(before), fingerprint_tensor(after))
    assert found is not None
    assert (found.element, found.bit) == (5, 31)


def test_no_other_change_is_taken_for_a_flip() -> None:
    torch.manual_seed(1)
    draw = random.Random(1)  # noqa: S311 - reproducible, not secret
    for dtype in TYPES:
        before = _data(dtype, 33)
        one = fingerprint_tensor(before)
        assert flipped_bit(before, one, one) is None
        for flips in (2, 2, 2, 3, 5, 16) * 30:
            places = {(draw.randrange(33), draw.randrange(8 * dtype.itemsize)) for _ in range(flips)}
            after = before
            for element, bit in places:
                after = _flipped(after, element, bit)
            found = flipped_bit(after, one, fingerprint_tensor(after))
            assert (found is None) == (len(places) > 1), (dtype, places)
        assert flipped_bit(before, one, fingerprint_tensor(_data(dtype, 33))) is None
    # Both linear sums change as they do for one flip: +2 -1 -1 ... that only the mix tells apart.
    words = torch.tensor([4, 4, 4, 4], dtype=torch.int32)
    alike = words + torch.tensor([1, -2, 2, 0], dtype=torch.int32)
    flip = words + torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    first, second, third = map(fingerprint_tensor, (words, alike, flip))
    assert (second.plain, third.plain) == (first.plain + 1, first.plain + 1)
    assert flipped_bit(alike, first, second) is None
    assert flipped_bit(flip, first, third) == Flip(element=1, bit=0, bits=5, bits_before=4)


def test_only_a_flip_on_one_rank_that_no_rank_wrote_to_is_held_against_it() -> None:
    flip, other = {"fingerprint": "a", "flip": {"element": 1}}, {"fingerprint": "b", "flip": None}
    assert flipped_alone([{"x": flip}, {}, {}], set()) == {"x": 0}
    assert flipped_alone([{}, {"y": flip}, {"x": flip}], set()) == {"x": 2, "y": 1}
    assert flipped_alone([{"x": flip}, {}, {}], {"x"}) == {}
    assert flipped_alone([{"x": flip}, {"x": flip}, {}], set()) == {}
    assert flipped_alone([{"x": flip}, {"x": other}, {}], set()) == {}
    assert flipped_alone([{"x": other}, {}, {}], set()) == {}
    assert flipped_alone([{}, {}, {}], set()) == {}
