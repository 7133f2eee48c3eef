"""What every rank holds a copy of without PyTorch keeping the copies equal: is a difference a fault, or the program's?

DDP averages gradients, so that parameters which differ prove a fault. It does not do so for buffers, nor for what it
was told to ignore: a program may keep a rank's own number there, average on rank 0 alone and leave the rest to DDP's
copy, or make a picture for the log on one rank. After a difference, and only then, the ranks look at what they know of
each such tensor. It accuses a rank only where all of this holds:

- every rank has it;
- a comparison has found it equal on all ranks before;
- since then no rank's program has written to it, as far as PyTorch counts writes. Or every rank's has, as it did before
  earlier comparisons that found it equal: a copy that the program itself keeps equal.

Otherwise it is not compared any longer in this run, and rank 0 says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from truestep.checks.places import Place, place_of, same_place
from truestep.collectives import CpuGroup
from truestep.fingerprint import FingerprintTable, agreeing_buffers

_log = logging.getLogger(__name__)


class HeldAlike:
    """What the ranks of one model know of such tensors. The same calls on every rank."""

    def __init__(self, module: nn.Module) -> None:
        """module: the one inside DDP."""
        self._module = module
        self._places: dict[str, Place] = {}
        """As of the last comparison that found all equal."""
        self._kept_equal: set[str] = set()
        """Written to by this rank's program, and found equal on all ranks afterwards."""
        self.apart: frozenset[str] = frozenset()
        """Not compared any longer; the same on every rank."""
        self.apart_parameters: frozenset[str] = frozenset()
        """Parameters among them: no other rank can replay a pass that uses them."""

    def found_equal(self) -> None:
        """A comparison found them equal on all ranks. No communication, no synchronisation with an accelerator."""
        before, self._places = self._places, {name: place_of(tensor) for name, tensor in self._tensors().items()}
        for name, place in self._places.items():
            if name in before and not same_place(place, before[name]):
                self._kept_equal.add(name)

    def set_apart(self, table: FingerprintTable, cpu: CpuGroup) -> bool:
        """After a comparison that found a difference. Collective. Whether one of them is not compared any longer, so
        that the rest must be compared anew.

        table: this rank's fingerprints as they were compared.
        """
        tensors = self._tensors()
        rows = cpu.gather_rows(
            {name: self._row(name, tensor, table) for name, tensor in tensors.items() if name in table}
        )
        reasons = not_accusing(rows)
        if not reasons:
            return False
        self.apart |= reasons.keys()
        parameters = {name for name, _ in self._module.named_parameters()}
        self.apart_parameters = self.apart & parameters
        if cpu.rank == 0:
            for name, reason in list(reasons.items())[:4]:
                _log.warning("%s is not compared between ranks any longer: %s", name, reason)
        return True

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        found = agreeing_buffers(self._module)
        ignored = ignored_names(self._module)
        if ignored:
            found |= {name: p for name, p in self._module.named_parameters() if name in ignored}
        return {name: tensor for name, tensor in found.items() if name not in self.apart}

    def _row(self, name: str, tensor: torch.Tensor, table: FingerprintTable) -> dict[str, Any]:
        before = self._places.get(name)
        return {
            "fingerprint": table[name],
            "known": before is not None,
            "written": before is not None and not same_place(place_of(tensor), before),
            "kept_equal": name in self._kept_equal,
        }


def ignored_names(module: nn.Module) -> Set[str]:
    """Names of parameters and buffers that the user told DDP to leave alone. module: the one inside DDP."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def not_accusing(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Name -> why its difference accuses nobody, of those that differ, in order of the names. Pure.

    rows: by rank, what each knows of its copies.
    """
    reasons: dict[str, str] = {}
    for name in sorted({name for row in rows for name in row}):
        lacking = [rank for rank, row in enumerate(rows) if name not in row]
        if lacking:
            reasons[name] = f"rank {_listed(lacking)} does not have it"
            continue
        seen = [row[name] for row in rows]
        if len({one["fingerprint"] for one in seen}) == 1:
            continue
        writers = [rank for rank, one in enumerate(seen) if one["written"]]
        if not all(one["known"] for one in seen):
            reasons[name] = "it has never been equal on all ranks, so it is each rank's own"
        elif writers and not (len(writers) == len(seen) and all(one["kept_equal"] for one in seen)):
            reasons[name] = (
                f"the program of rank {_listed(writers)} has written to it since it was last equal on all ranks"
            )
    return reasons


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
