"""Fingerprints of torch tensors, in chunks that stay in cache on a CPU and in few launches on an accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from truestep.fingerprint.sums import FMIX_1, FMIX_2, KEY, Fingerprint, signed

CPU_CHUNK_PAIRS = 1 << 15
"""256 KiB of data, with two scratch buffers and two tables of that size: fits a core's second-level cache."""
ACCELERATOR_CHUNK_PAIRS = 1 << 24

if sys.byteorder != "little":
    raise ImportError("truestep's fingerprints read words little-endian; this machine is big-endian")


def fingerprint_tensor(tensor: torch.Tensor, *, chunk_pairs: int | None = None) -> Fingerprint:
    """The fingerprint of the tensor's elements in logical order; dtype and shape do not enter, the length in bytes
    does.

    chunk_pairs: pairs of 32-bit words a pass; any value gives the same result. One host synchronisation.
    Raises `TypeError` for sparse and distributed tensors.
    """
    sums = pending_sums(tensor, chunk_pairs=chunk_pairs)
    return settle_sums([sums], [_length_bytes(tensor)])[0]


def fingerprint_tensors(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Printed fingerprint of every tensor; one host synchronisation a device."""
    names = list(named)
    pending = [pending_sums(named[name]) for name in names]
    settled = settle_sums(pending, [_length_bytes(named[name]) for name in names])
    return {name: str(value) for name, value in zip(names, settled, strict=True)}


def settle_sums(pending: Sequence[torch.Tensor], length_bytes: Sequence[int]) -> list[Fingerprint]:
    """Fingerprints from the results of `pending_sums`, fetched with one host synchronisation a device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, sums in enumerate(pending):
        by_device.setdefault(sums.device, []).append(index)
    result: list[Fingerprint | None] = [None] * len(pending)
    for indices in by_device.values():
        for index, row in zip(indices, torch.stack([pending[i] for i in indices]).tolist(), strict=True):
            result[index] = Fingerprint.from_sums(*row, length_bytes=length_bytes[index])
    return [value for value in result if value is not None]


@torch.no_grad()
def pending_sums(tensor: torch.Tensor, *, chunk_pairs: int | None = None) -> torch.Tensor:
    """The three sums over the data, int64 [3] on the tensor's device; no host synchronisation."""
    raw = _raw_bytes(tensor)
    whole = raw.numel() // 8 * 8
    pairs = _as_pairs(raw[:whole])
    if chunk_pairs is None:
        chunk_pairs = CPU_CHUNK_PAIRS if raw.device.type == "cpu" else ACCELERATOR_CHUNK_PAIRS
    total = torch.zeros(3, dtype=torch.int64, device=raw.device)
    for start in range(0, pairs.numel(), chunk_pairs):
        total += _chunk_sums(pairs[start : start + chunk_pairs], start)
    if whole != raw.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total += _chunk_sums(tail.view(torch.int64), whole // 8)
    return total


def _chunk_sums(pairs: torch.Tensor, start: int) -> torch.Tensor:
    """Sums over `pairs` (int64 [n]), whose first one has 0-based index `start`."""
    odd, keyed = _positions(_table_size(pairs.numel()), pairs.device)
    odd, keyed = odd[: pairs.numel()], keyed[: pairs.numel()]
    high = pairs >> 32
    high &= 0xFFFFFFFF
    both = pairs & 0xFFFFFFFF
    both += high
    high_sum, plain = high.sum(), both.sum()
    # Words 2k and 2k+1 of pair k weigh 2k+1 and 2k+2: (2k+1) * both + high, with k = start + index.
    torch.mul(both, odd, out=both)
    position = both.sum() + high_sum + plain * signed(2 * start)

    mixed = torch.add(keyed, signed(start * KEY), out=both)
    mixed ^= pairs
    scratch = high
    for factor in (FMIX_1, FMIX_2, None):
        # An int64 shift is arithmetic: the mask clears the sign's copies, or the mix would not be invertible.
        torch.bitwise_right_shift(mixed, 33, out=scratch)
        scratch &= 0x7FFFFFFF
        mixed ^= scratch
        if factor is not None:
            mixed *= signed(factor)
    return torch.stack([plain, position, mixed.sum()])


def _table_size(pairs: int) -> int:
    return CPU_CHUNK_PAIRS if pairs <= CPU_CHUNK_PAIRS else 1 << (pairs - 1).bit_length()


@lru_cache(maxsize=8)
def _positions(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """2k+1, and (k+1) * KEY, for k in 0..size-1."""
    index = torch.arange(size, dtype=torch.int64, device=device)
    return index * 2 + 1, (index + 1) * signed(KEY)


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise TypeError(f"cannot fingerprint a tensor of layout {tensor.layout}; pass its values and indices instead")
    if hasattr(tensor, "device_mesh"):
        raise TypeError("cannot fingerprint a DTensor as a whole; pass its local shard (tensor.to_local())")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8)


def _as_pairs(raw: torch.Tensor) -> torch.Tensor:
    if raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _length_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def length_bytes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Length of each tensor's elements in bytes."""
    return [_length_bytes(tensor) for tensor in tensors]
