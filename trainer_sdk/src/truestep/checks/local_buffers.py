"""Buffers that follow the local batches, so that healthy replicas hold different ones: they are not compared.

BatchNorm's running statistics are known by name. A moving average of the user's own is known by what happens to it: the
pass writes to it, on every rank. A constant that one rank's pass writes to is none, and stays compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from truestep.collectives import CpuGroup


class LocalBuffers:
    """What the ranks have found out together; the same on every rank."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._agreed: frozenset[str] = frozenset()

    def note(self, written: Iterable[str]) -> bool:
        """Take in the names of the buffers that this rank's pass wrote to. Whether there was a new one among them:
        then all ranks must call `agree`."""
        before = len(self._written)
        self._written.update(written)
        return len(self._written) > before

    def agree(self, cpu: CpuGroup) -> None:
        """Collective; at most once a buffer and rank in a run."""
        rows = cpu.gather_rows({"written": sorted(self._written)})
        self._agreed = frozenset.intersection(*(frozenset(row["written"]) for row in rows))

    @property
    def names(self) -> frozenset[str]:
        """What is not compared."""
        return self._agreed
