"""Where tensors differ: every element type, bit patterns and not values."""

from __future__ import annotations

import pytest
import torch

from truestep.cli.difference import compare, describe_bits

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
INTEGER = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGER])
def test_every_single_flipped_bit_is_found_in_its_place(dtype: torch.dtype) -> None:
    width = dtype.itemsize * 8
    for bit in range(1 if dtype is torch.bool else width):
        first = torch.zeros(3, 4, dtype=torch.float32).to(dtype)
        second = first.clone()
        word = 1 << bit if bit < width - 1 or dtype.itemsize == 1 else -(1 << bit)
        second.view(WORDS[dtype.itemsize])[2, 1] ^= word
        (difference,) = compare({"w": first}, {"w": second}, max_elements=8)
        assert difference.elements_differing == 1
        assert difference.bits_flipped == {str(bit): 1}
        assert (difference.examples[0].index, difference.examples[0].flipped_bits) == ((2, 1), (bit,))


def test_bit_patterns_count_and_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert compare({"w": nan}, {"w": nan.clone()}, max_elements=8) == []
    (difference,) = compare({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}, max_elements=8)
    assert difference.examples[0].flipped_bits == (31,)


def test_layout_in_memory_does_not_count() -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    strided = plain.t().contiguous().t()
    assert compare({"w": plain}, {"w": strided}, max_elements=8) == []


def test_complex_tensor_is_located_in_its_real_or_imaginary_part() -> None:
    first = torch.zeros(2, dtype=torch.complex64)
    second = torch.tensor([0, 1j], dtype=torch.complex64)
    (difference,) = compare({"w": first}, {"w": second}, max_elements=8)
    assert difference.examples[0].index == (1, 1)


def test_differences_behind_the_first_chunk_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.cli.difference._CHUNK_ELEMENTS", 8)
    first = torch.zeros(5, 5)
    second = first.clone()
    second[1, 4], second[4, 4] = 1.0, 2.0
    (difference,) = compare({"w": first}, {"w": second}, max_elements=8)
    assert [element.index for element in difference.examples] == [(1, 4), (4, 4)]


def test_names_forms_and_values_that_differ_are_told_apart() -> None:
    first: dict[str, torch.Tensor | str] = {"a": torch.zeros(2), "b": torch.zeros(2), "lr": "0x1p-3", "same": "1"}
    second: dict[str, torch.Tensor | str] = {
        "b": torch.zeros(2, dtype=torch.float64),
        "c": torch.zeros(1),
        "lr": "0x1p-4",
        "same": "1",
    }
    found = {difference.name: difference for difference in compare(first, second, max_elements=8)}
    kinds = {name: difference.kind for name, difference in found.items()}
    assert kinds == {"a": "only in first", "b": "form", "c": "only in second", "lr": "value"}
    assert found["b"].detail == "float32 [2], float64 [2]"


def test_empty_and_scalar_tensors_are_compared() -> None:
    first = {"none": torch.zeros(0), "scalar": torch.tensor(1.0)}
    second = {"none": torch.zeros(0), "scalar": torch.tensor(2.0)}
    (difference,) = compare(first, second, max_elements=8)
    assert (difference.name, difference.examples[0].index) == ("scalar", ())


@pytest.mark.parametrize(
    ("dtype", "bits", "words"),
    [
        ("float32", (0, 22, 23, 30, 31), "mantissa 0, 22; exponent 23, 30; sign 31"),
        ("bfloat16", (6, 7, 14, 15), "mantissa 6; exponent 7, 14; sign 15"),
        ("float16", (9, 10, 15), "mantissa 9; exponent 10; sign 15"),
        ("float64", (51, 52, 63), "mantissa 51; exponent 52; sign 63"),
        ("float32", (0, 1, 2, 5, 7, 8), "mantissa 0-2, 5, 7-8"),
        ("int32", (1, 2, 31), "1-2, 31"),
    ],
)
def test_bits_are_named_by_what_they_are_in_the_format(dtype: str, bits: tuple[int, ...], words: str) -> None:
    assert describe_bits(dtype, bits) == words
