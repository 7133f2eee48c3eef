"""The sums in torch operations: what runs on every device, in chunks that stay in cache on a CPU."""

from __future__ import annotations

from functools import lru_cache

import torch

from truestep.fingerprint.sums import FMIX_1, FMIX_2, KEY, signed

CPU_CHUNK_PAIRS = 1 << 15
"""256 KiB of data, with two scratch buffers and two tables of that size."""
ACCELERATOR_CHUNK_PAIRS = 1 << 24
_WORD = (1 << 32) - 1


@torch.no_grad()
def eager_sums(raw: torch.Tensor, *, chunk_pairs: int | None = None) -> torch.Tensor:
    """int64 [3] over a contiguous uint8 tensor, on its device; no host synchronisation.

    chunk_pairs: pairs of 32-bit words a pass; any value gives the same result.
    """
    if raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    pairs = raw[:whole].view(torch.int64)
    if chunk_pairs is None:
        chunk_pairs = CPU_CHUNK_PAIRS if raw.device.type == "cpu" else ACCELERATOR_CHUNK_PAIRS
    scratch = torch.empty(2, min(chunk_pairs, max(pairs.numel(), 1)), dtype=torch.int64, device=raw.device)
    total = torch.zeros(3, dtype=torch.int64, device=raw.device)
    for start in range(0, pairs.numel(), chunk_pairs):
        total += _chunk_sums(pairs[start : start + chunk_pairs], start, scratch)
    if whole != raw.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total += _chunk_sums(tail.view(torch.int64), whole // 8, scratch)
    return total


def _chunk_sums(pairs: torch.Tensor, start: int, scratch: torch.Tensor) -> torch.Tensor:
    """Sums over `pairs` (int64 [n]), whose first one has 0-based index `start`. scratch: int64 [2, n or more]."""
    odd, keyed = _positions(_table_size(pairs.numel()), pairs.device)
    odd, keyed = odd[: pairs.numel()], keyed[: pairs.numel()]
    high, work = scratch[0, : pairs.numel()], scratch[1, : pairs.numel()]
    _logical_shift(pairs, 32, high)
    torch.add(pairs, high, alpha=-_WORD, out=work)  # low + high, as pair = low + 2^32 * high
    high_sum, plain = high.sum(), work.sum()
    # Words 2k and 2k+1 of pair k weigh 2k+1 and 2k+2: (2k+1) * (low + high) + high, with k = start + index.
    work *= odd
    position = work.sum() + high_sum + plain * signed(2 * start)

    torch.add(keyed, signed(start * KEY), out=work)
    work ^= pairs
    for factor in (FMIX_1, FMIX_2, None):
        work ^= _logical_shift(work, 33, high)
        if factor is not None:
            work *= signed(factor)
    return torch.stack([plain, position, work.sum()])


def _logical_shift(values: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    # An int64 shift is arithmetic: the mask clears the sign's copies, or the mix would not be invertible.
    torch.bitwise_right_shift(values, bits, out=out)
    out &= (1 << (64 - bits)) - 1
    return out


def _table_size(pairs: int) -> int:
    return CPU_CHUNK_PAIRS if pairs <= CPU_CHUNK_PAIRS else 1 << (pairs - 1).bit_length()


@lru_cache(maxsize=8)
def _positions(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """2k+1, and (k+1) * KEY, for k in 0..size-1."""
    index = torch.arange(size, dtype=torch.int64, device=device)
    return index * 2 + 1, (index + 1) * signed(KEY)
