"""Fingerprints of torch tensors, by the fastest path that their device has; every path gives the same value.

Host memory: compiled C (`native`). CUDA: one Triton launch over all tensors (`triton`). Everything else, and where a
compiler or Triton is missing: torch operations (`eager`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import torch

from truestep.fingerprint.eager import eager_sums
from truestep.fingerprint.native import KERNEL
from truestep.fingerprint.sums import Fingerprint
from truestep.fingerprint.table import FingerprintTable, SumsOfMany

if sys.byteorder != "little":
    raise ImportError("truestep's fingerprints read words little-endian; this machine is big-endian")


class _ManySums(Protocol):
    def __call__(self, raws: Sequence[torch.Tensor]) -> torch.Tensor: ...


def fingerprint_tensor(tensor: torch.Tensor) -> Fingerprint:
    """The fingerprint of the tensor's elements in logical order; dtype and shape do not enter, the length in bytes
    does.

    One host synchronisation. Raises `TypeError` for sparse and distributed tensors.
    """
    return settle_sums([pending_sums(tensor)], [_length_bytes(tensor)])[0]


class PendingFingerprints:
    """Sums that their devices still compute; made by `begin_fingerprints`."""

    def __init__(self, parts: Sequence[SumsOfMany], texts: Mapping[str, str]) -> None:
        """parts: their rows lie on their devices still."""
        self._parts = parts
        self._texts = texts

    def table(self) -> FingerprintTable:
        """One host synchronisation a device; where the stream was waited for since, it waits for nothing."""
        return FingerprintTable([replace(part, rows=part.rows.cpu()) for part in self._parts], self._texts)


def begin_fingerprints(named: Mapping[str, torch.Tensor | str]) -> PendingFingerprints:
    """Fingerprints of the data as it is now, texts as they are; no host synchronisation, and on CUDA one launch.

    Raises `TypeError` for sparse and distributed tensors.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    texts: dict[str, str] = {}
    for name, leaf in sorted(named.items()):
        if isinstance(leaf, torch.Tensor):
            by_device.setdefault(leaf.device, {})[name] = leaf
        else:
            texts[name] = leaf
    # Ranks have GPUs of different numbers, in the same order.
    devices = sorted(by_device, key=lambda device: (device.type, device.index or 0))
    parts = []
    for device in devices:
        tensors = by_device[device]
        sizes = [tensor.nbytes for tensor in tensors.values()]
        parts.append(SumsOfMany(tuple(tensors), sizes, _sums([*tensors.values()])))
    return PendingFingerprints(parts, texts)


def fingerprint_tensors(named: Mapping[str, torch.Tensor | str]) -> FingerprintTable:
    """Fingerprints by name, texts as they are; one host synchronisation a device, and on CUDA one launch.

    Raises `TypeError` for sparse and distributed tensors.
    """
    return begin_fingerprints(named).table()


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


def pending_sums(tensor: torch.Tensor) -> torch.Tensor:
    """The three sums over the data, int64 [3] on the tensor's device; no host synchronisation."""
    return _sums([tensor])[0]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes] of the elements in logical order: a view where the tensor is contiguous, else a copy."""
    return _contiguous(tensor).detach().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, whose memory is its elements in logical order."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"cannot fingerprint a tensor of layout {tensor.layout}; pass its values and indices instead")
    if hasattr(tensor, "device_mesh"):
        raise TypeError("cannot fingerprint a DTensor as a whole; pass its local shard (tensor.to_local())")
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [n, 3] of tensors on one device."""
    device = tensors[0].device.type
    if device == "cpu":
        # Without views: for many small tensors they cost as much as the sums.
        native = KERNEL.sums([_contiguous(tensor) for tensor in tensors])
        if native is not None:
            return native
    raws = [raw_bytes(tensor) for tensor in tensors]
    if device == "cuda":
        launch = _triton_sums()
        if launch is not None:
            return launch(raws)
    return torch.stack([eager_sums(raw) for raw in raws])


@lru_cache(maxsize=1)
def _triton_sums() -> _ManySums | None:
    try:
        from truestep.fingerprint.triton import triton_sums
    except ImportError:
        return None
    return triton_sums


def _length_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
