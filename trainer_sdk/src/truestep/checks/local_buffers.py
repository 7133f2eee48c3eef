"""Buffers that follow the local batches, so that healthy replicas hold different ones: they are not compared.

BatchNorm's running statistics are known by name. A moving average of the user's own is known by what happens to it: the
pass writes to it, on every rank. Its version tells, and its content on steps whose copies are compared: not every write
raises a version. A constant that one rank's pass writes to is none, and stays compared. Of a buffer that the pass makes
(a mask, or a scale taken from the first batch) the ranks' first values tell: equal ones stay compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from truestep.collectives import CpuGroup
from truestep.fingerprint import fingerprint_tensors, named_buffers

_log = logging.getLogger(__name__)


class LocalBuffers:
    """What the ranks have found out together; the same on every rank."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._made: set[str] = set()
        self._made_now: frozenset[str] = frozenset()
        self._equal: frozenset[str] = frozenset()
        """Made by the pass, with the same first value on every rank."""
        self._agreed: frozenset[str] = frozenset()
        self._warned = False
        self.made_somewhere: frozenset[str] = frozenset()
        """What the pass of this step made, on any rank: it started without them, and no rank can start so again."""

    def note(self, written: Iterable[str], made: frozenset[str]) -> bool:
        """Take in the names of the buffers that this rank's pass wrote to and made. Whether there was a new one among
        them: then all ranks must call `agree`."""
        before = len(self._written), len(self._made)
        # Made anew in every pass is written to.
        self._written.update(written, made & self._made)
        self._made_now, self.made_somewhere = made - self._made, frozenset()
        self._made.update(made)
        return (len(self._written), len(self._made)) != before

    def agree(self, cpu: CpuGroup, module: nn.Module) -> None:
        """Collective; at most twice a buffer and rank in a run. module: with the buffers as the pass left them."""
        buffers = named_buffers(module)
        fresh = fingerprint_tensors({name: buffers[name] for name in self._made_now if name in buffers})
        rows = cpu.gather_rows({"written": sorted(self._written), "made": sorted(self._made), "fresh": dict(fresh)})
        self.made_somewhere = frozenset().union(*(row["fresh"] for row in rows))
        first = rows[0]["fresh"]
        self._equal |= {name for name in first if all(row["fresh"].get(name) == first[name] for row in rows)}
        moving = frozenset.intersection(*(frozenset(row["written"]) for row in rows))
        either = frozenset.intersection(*(frozenset(row["written"]) | frozenset(row["made"]) for row in rows))
        self._agreed = moving | (either - self._equal)

    def repeatable(self, step: int) -> bool:
        """Whether another rank can run this step's pass again from what it started with. The same on every rank."""
        if self.made_somewhere and not self._warned:
            self._warned = True
            _log.warning(
                "step %d is not audited: its forward made %s, and no rank can run it again without; register buffers "
                "when the model is built",
                step,
                ", ".join(sorted(self.made_somewhere)[:4]),
            )
        return not self.made_somewhere

    @property
    def names(self) -> frozenset[str]:
        """What is not compared."""
        return self._agreed
