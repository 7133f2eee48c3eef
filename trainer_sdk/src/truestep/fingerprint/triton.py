"""The sums in one launch over any number of tensors on a GPU: every byte is read once. Needs Triton, which PyTorch's
CUDA builds bring along.

Sums modulo 2^64 do not depend on their order, so programs add theirs with integer atomics and the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from truestep.fingerprint.sums import FMIX_1, FMIX_2, KEY, signed

BLOCK_PAIRS = 2048
"""16 KiB a turn of a program, 8 pairs a thread."""
SPAN_BLOCKS = 8
"""Turns of a program: few enough atomics, and still thousands of programs a gigabyte."""
_WARPS = 8
_KEY = tl.constexpr(signed(KEY))
_FMIX_1 = tl.constexpr(signed(FMIX_1))
_FMIX_2 = tl.constexpr(signed(FMIX_2))


@triton.jit
def _fold(values):  # type: ignore[no-untyped-def]
    # An int64 shift is arithmetic: the mask clears the sign's copies, or the mix would not be invertible.
    return values ^ ((values >> 33) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]
    pointers,
    lengths,
    tensor_of,
    span_of,
    results,
    BLOCK: tl.constexpr,  # noqa: N803
    SPAN: tl.constexpr,  # noqa: N803
):
    """One program sums one span of one tensor. pointers: int64 addresses, 8-byte aligned; lengths: bytes; SPAN: blocks
    of BLOCK pairs."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    address = tl.load(pointers + tensor)
    length = tl.load(lengths + tensor)
    whole = length // 8
    first = tl.load(span_of + program) * SPAN * BLOCK
    # The last, partial pair is read byte by byte: nothing behind the tensor's end is touched.
    byte = tl.arange(0, 8).to(tl.int64)
    tail = tl.load(address.to(tl.pointer_type(tl.uint8)) + whole * 8 + byte, mask=whole * 8 + byte < length, other=0)
    tail_pair = tl.sum(tail.to(tl.int64) << (8 * byte))

    plain = tl.zeros([BLOCK], dtype=tl.int64)
    position = tl.zeros([BLOCK], dtype=tl.int64)
    mix = tl.zeros([BLOCK], dtype=tl.int64)
    turns = tl.minimum(tl.cdiv(tl.cdiv(length, 8) - first, BLOCK), SPAN)
    for turn in range(turns):
        index = first + turn * BLOCK + tl.arange(0, BLOCK)
        pairs = tl.load(address.to(tl.pointer_type(tl.int64)) + index, mask=index < whole, other=0)
        pairs = tl.where(index == whole, tail_pair, pairs)
        high = (pairs >> 32) & 0xFFFFFFFF
        both = (pairs & 0xFFFFFFFF) + high
        plain += both
        position += both * (2 * index + 1) + high
        mixed = _fold(_fold(_fold(pairs ^ (index + 1) * _KEY) * _FMIX_1) * _FMIX_2)
        mix += tl.where(index * 8 < length, mixed, 0)
    tl.atomic_add(results + 3 * tensor, tl.sum(plain))
    tl.atomic_add(results + 3 * tensor + 1, tl.sum(position))
    tl.atomic_add(results + 3 * tensor + 2, tl.sum(mix))


@torch.no_grad()
def triton_sums(
    raws: Sequence[torch.Tensor], *, block_pairs: int = BLOCK_PAIRS, span_blocks: int = SPAN_BLOCKS
) -> torch.Tensor:
    """int64 [n, 3] of contiguous uint8 tensors on one device, in one launch; no host synchronisation.

    block_pairs: pairs of words a turn, a power of two; span_blocks: turns a program. Any value gives the same result.
    """
    aligned = [raw.clone() if raw.data_ptr() % 8 else raw for raw in raws]
    device = aligned[0].device
    results = torch.zeros(len(aligned), 3, dtype=torch.int64, device=device)
    spans = tuple((raw.data_ptr(), raw.numel()) for raw in aligned)
    pointers, lengths, tensor_of, span_of = _tables(spans, 8 * block_pairs * span_blocks, device)
    if tensor_of.numel():
        with torch.cuda.device_of(results):  # type: ignore[no-untyped-call]
            _sums_kernel[(tensor_of.numel(),)](
                pointers, lengths, tensor_of, span_of, results, BLOCK=block_pairs, SPAN=span_blocks, num_warps=_WARPS
            )
    return results


@lru_cache(maxsize=64)
def _tables(
    spans: tuple[tuple[int, int], ...], span_bytes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Address and length in bytes of each tensor; tensor, and span within it, of each program. Weights stay where they
    are, so theirs are made once."""
    table = torch.tensor(spans, dtype=torch.int64)
    counts = (table[:, 1] + span_bytes - 1) // span_bytes
    starts = counts.cumsum(0) - counts
    tensor_of = torch.repeat_interleave(torch.arange(len(spans)), counts)
    span_of = torch.arange(tensor_of.numel()) - starts[tensor_of]
    columns = (table[:, 0].contiguous(), table[:, 1].contiguous(), tensor_of, span_of)
    pointers, lengths, tensors, numbers = (column.to(device) for column in columns)
    return pointers, lengths, tensors, numbers
