"""Fingerprints by name, printed only when somebody reads them: a clean step compares one word."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from truestep.fingerprint.sums import Fingerprint, combine, signed


@dataclass(frozen=True)
class SumsOfMany:
    """What was computed on one device."""

    names: tuple[str, ...]
    length_bytes: Sequence[int]
    rows: torch.Tensor
    """int64 [n, 3], contiguous, in host memory by the time a table is made of it: plain, position, mix, without the
    lengths."""


class FingerprintTable(Mapping[str, str]):
    """Name -> printed fingerprint of a tensor, or a text as it was given."""

    def __init__(self, sums: Sequence[SumsOfMany], texts: Mapping[str, str]) -> None:
        """sums: the same devices in the same order on every rank, the names of each sorted."""
        self._sums = sums
        self._texts = texts

    @cached_property
    def word(self) -> int:
        """int64 that is the same for two tables if and (but for a chance of 2^-64) only if they are equal.

        Printing and combining 50 fingerprints takes 0.5 ms; this takes a fiftieth of it.
        """
        digest = hashlib.sha256()
        for part in self._sums:
            count = len(part.names)
            digest.update(repr(part.names).encode())
            digest.update(struct.pack(f"<{count}q", *part.length_bytes))
            digest.update(ctypes.string_at(part.rows.data_ptr(), 24 * count))
        digest.update(repr(sorted(self._texts.items())).encode())
        return signed(int.from_bytes(digest.digest()[:8], "little"))

    @property
    def combined(self) -> str:
        """One printed fingerprint over all, the same for any order of the names."""
        return combine(self._printed)

    def changed_since(self, earlier: FingerprintTable) -> list[str]:
        """Names whose fingerprint is another one than in `earlier`, or is not there; nothing is printed for tensors
        that both tables hold on the same devices."""
        if self.word == earlier.word:
            return []
        if [(part.names, *part.length_bytes) for part in self._sums] != [
            (part.names, *part.length_bytes) for part in earlier._sums
        ]:
            return [name for name in self if self[name] != earlier.get(name)]
        pairs = zip(self._sums, earlier._sums, strict=True)
        moved = [(part.names, (part.rows != other.rows).any(1).tolist()) for part, other in pairs]
        names = [name for names, flags in moved for name, flag in zip(names, flags, strict=True) if flag]
        return names + [name for name, text in self._texts.items() if earlier._texts.get(name) != text]

    @cached_property
    def _printed(self) -> dict[str, str]:
        printed = {
            name: str(Fingerprint.from_sums(*row, length_bytes=length))
            for part in self._sums
            for name, row, length in zip(part.names, part.rows.tolist(), part.length_bytes, strict=True)
        }
        return {**printed, **self._texts}

    def __getitem__(self, name: str) -> str:
        return self._printed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._printed)

    def __len__(self) -> int:
        return sum(len(part.names) for part in self._sums) + len(self._texts)
