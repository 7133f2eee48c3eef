"""Where two sets of tensors differ, to the bit. What an alarm's evidence is about, found without the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 22
"""Elements compared at a time: bounds the scratch memory at 32 MiB for 8-byte elements."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


@dataclass(frozen=True, kw_only=True)
class ElementDifference:
    """One element that differs."""

    index: tuple[int, ...]
    """In the tensor's shape; a complex tensor has a last index 0 (real) or 1 (imaginary)."""
    first: float | int
    second: float | int
    flipped_bits: tuple[int, ...]
    """Numbers of the bits that differ, 0 the lowest."""


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One name under which the two sides do not hold the same."""

    name: str
    kind: str
    """``bits``; ``form`` (dtype or shape differ), ``value`` (not a tensor), ``only in first``, ``only in second``."""
    detail: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = 0
    """Elements of the tensor."""
    elements_differing: int = 0
    bits_flipped: Mapping[str, int] | None = None
    """Bit number -> in how many elements it differs."""
    examples: tuple[ElementDifference, ...] = ()
    """The first ones, in order of the index."""


def bytes_to_compare(first: Mapping[str, torch.Tensor | str]) -> int:
    """What `compare` reports to its `on_compared` in the end, in bytes of the first side's tensors."""
    return sum(map(_bytes, first.values()))


def compare(
    first: Mapping[str, torch.Tensor | str],
    second: Mapping[str, torch.Tensor | str],
    *,
    max_elements: int,
    on_compared: Callable[[int], object] = lambda _: None,
) -> list[TensorDifference]:
    """Every name whose content differs, sorted. Bits count, not values: -0.0 is not 0.0, and a NaN equals itself.

    on_compared: called before each tensor of the first side with its bytes, for a bar of progress.
    """
    differences = []
    for name in sorted({*first, *second}):
        on_compared(_bytes(first.get(name, "")))
        if name not in first or name not in second:
            side = "first" if name in first else "second"
            differences.append(TensorDifference(name=name, kind=f"only in {side}"))
            continue
        found = _compare_leaves(name, first[name], second[name], max_elements)
        if found is not None:
            differences.append(found)
    return differences


def describe_bits(dtype: str, bits: Sequence[int]) -> str:
    """``mantissa 0-3, 5; sign 15`` of a floating-point dtype such as ``bfloat16``, ``0-3, 5`` of others.

    bits: their numbers, in rising order.
    """
    parts = []
    for role, members in groupby(bits, key=lambda bit: _bit_role(dtype, bit)):
        # Neighbours have the same distance to their place in the row.
        runs = [[bit for _, bit in run] for _, run in groupby(enumerate(members), key=lambda pair: pair[1] - pair[0])]
        numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        parts.append(f"{role} {numbers}".strip())
    return "; ".join(parts)


def _bit_role(dtype: str, bit: int) -> str:
    for known, mantissa in _MANTISSA_BITS.items():
        if dtype == _name(known):
            top = known.itemsize * 8 - 1
            return "sign" if bit == top else "exponent" if bit >= mantissa else "mantissa"
    return ""


def _bytes(leaf: torch.Tensor | str) -> int:
    return 0 if isinstance(leaf, str) else leaf.nbytes


def _compare_leaves(
    name: str, first: torch.Tensor | str, second: torch.Tensor | str, max_elements: int
) -> TensorDifference | None:
    if isinstance(first, str) or isinstance(second, str):
        if isinstance(first, str) and isinstance(second, str) and first == second:
            return None
        return TensorDifference(name=name, kind="value", detail=f"{_form(first)}, {_form(second)}")
    if first.dtype != second.dtype or first.shape != second.shape:
        return TensorDifference(name=name, kind="form", detail=f"{_form(first)}, {_form(second)}")
    return _compare_tensors(name, _real(first), _real(second), max_elements)


def _compare_tensors(name: str, first: torch.Tensor, second: torch.Tensor, limit: int) -> TensorDifference | None:
    a, b = _words(first), _words(second)
    places: list[torch.Tensor] = []
    for start in range(0, a.numel(), _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        places.append((a[chunk] != b[chunk]).nonzero().reshape(-1) + start)
    differing = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    if not differing.numel():
        return None
    width = first.element_size() * 8
    flipped = (a[differing] ^ b[differing]).to(torch.int64)
    counts = {bit: int((flipped >> bit & 1).sum()) for bit in range(width)}
    shown = differing[:limit].tolist()
    return TensorDifference(
        name=name,
        kind="bits",
        dtype=_name(first.dtype),
        shape=tuple(first.shape),
        elements=first.numel(),
        elements_differing=differing.numel(),
        bits_flipped={str(bit): count for bit, count in counts.items() if count},
        examples=tuple(
            ElementDifference(
                index=_index(place, first.shape),
                first=_value(first, place),
                second=_value(second, place),
                flipped_bits=tuple(bit for bit in range(width) if int(flipped[number]) >> bit & 1),
            )
            for number, place in enumerate(shown)
        ),
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise TypeError(f"cannot compare a tensor of layout {tensor.layout}")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(_WORDS[tensor.element_size()])


def _index(place: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def _value(tensor: torch.Tensor, place: int) -> float | int:
    element = tensor.reshape(-1)[place]
    value: float | int = element.to(torch.float64).item() if element.is_floating_point() else int(element)
    return value


def _form(leaf: torch.Tensor | str) -> str:
    return leaf if isinstance(leaf, str) else f"{_name(leaf.dtype)} {list(leaf.shape)}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
