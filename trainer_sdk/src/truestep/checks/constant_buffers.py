"""A constant buffer that changes in one rank's memory, seen before DDP makes the copies equal again.

Under DDP's default, `broadcast_buffers=True`, rank 0's buffers are copied to every rank in front of the forward: a bit
that flips on rank 0 is then everybody's, and one that flips elsewhere is gone. So every rank fingerprints its buffers
at `start_step`, and the words are compared with the step's all-reduce, before the update.

A copy that differs is no fault by itself: code may write to a buffer on rank 0 and leave the rest to DDP. Writes
through PyTorch raise the tensor's version, or leave another tensor or other memory behind. Those through `.data`,
NumPy, DLPack or ctypes do not, nor does a collective, a batch norm, or a custom operator that does not declare them: no
version proves a fault. A rank is accused where all of this holds, and else the buffer is not watched any longer:

- the buffer was the same in `STEADY_STEPS` steps in a row;
- since the last one it changed on one rank alone, and on no rank is there a sign of a write;
- one bit flipped, in a buffer of more than one element: code that writes on one rank alone, behind PyTorch's back,
  writes whole buffers, counters or masks. Not the lowest bit of an integer or a bool: that is +-1, or True for False.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import Attachment
from truestep.checks.finding import SHOWN_NAMES, Finding
from truestep.checks.held_alike import ignored_names
from truestep.checks.local_buffers import LocalBuffers
from truestep.checks.places import Place, place_of, same_place
from truestep.contract import Check
from truestep.fingerprint import (
    Fingerprint,
    FingerprintTable,
    PendingFingerprints,
    agreeing_buffers,
    begin_fingerprints,
    flipped_bit,
    word,
)
from truestep.judge import judge_copies

_log = logging.getLogger(__name__)

STEADY_STEPS = 8
"""Whatever code writes to more often than that is found out as no constant before anybody can be accused."""


MOST_PENDING = 64
"""Looks whose sums may still lie on their device: a validation makes thousands."""
MOST_CHANGES = 64
"""Of one step that are remembered: a program that writes in front of every forward would fill the memory."""


@dataclass(frozen=True)
class _Look:
    """This rank's copies in front of a forward."""

    buffers: Mapping[str, Place]
    pending: PendingFingerprints


@dataclass(frozen=True)
class _Seen:
    """A look at which something was another than at the one before."""

    number: int
    """Counts all looks, so it is the same on every rank."""
    buffers: Mapping[str, Place]
    table: FingerprintTable


class ConstantBuffers:
    """Buffers of one model that DDP copies from rank 0 in front of every forward. The same names on every rank."""

    def __init__(self, attachment: Attachment, ddp_model: DistributedDataParallel, local_buffers: LocalBuffers) -> None:
        """local_buffers: those that are not compared at all. Looks until it is given up by its owner."""
        self._attachment = attachment
        self._model = ddp_model
        self._local_buffers = local_buffers
        self._dropped: set[str] = set()
        """Found to be no constants, by all ranks together."""
        self._steps = 0
        self._changed_at: dict[str, int] = {}
        """Number of the step in which the buffer was found changed; none for one that never was."""
        self._looks = 0
        self._pending: list[_Look] = []
        self._seen: list[_Seen] = []
        """What the copies were at the end of the step before, and each change since."""
        self._based = self._compared = False
        """Whether there was a step to compare with, and whether the exchange has had all that was seen."""
        if attachment.world_size > 1:
            about = weakref.ref(self)

            def look(_model: nn.Module, _arguments: Any) -> None:
                buffers = about()
                if buffers is not None:
                    buffers._look()

            # Of the model around the copy: a hook of the inner module runs behind it.
            weakref.finalize(self, ddp_model.register_forward_pre_hook(look).remove).atexit = False

    def _look(self) -> None:
        """Reads every watched buffer once; no host synchronisation, but for one in `MOST_PENDING` looks."""
        if not _overwritten(self._model):
            return  # the comparison after the update finds it
        apart = self._local_buffers.names | self._dropped | ignored_names(self._model.module)
        watched = {name: b for name, b in agreeing_buffers(self._model.module).items() if name not in apart}
        if watched:
            places = {name: place_of(buffer) for name, buffer in watched.items()}
            self._pending.append(_Look(places, begin_fingerprints(watched)))
        if len(self._pending) >= MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        """Read the sums of all looks, and keep those at which something changed."""
        if self._compared:
            # No alarm came of it: what had changed was written to.
            for before, after in itertools.pairwise(self._seen):
                self._changed_at |= dict.fromkeys(after.table.changed_since(before.table), self._steps)
            self._seen, self._compared = self._seen[-1:], False
        for look in self._pending:
            self._looks += 1
            table, last = look.pending.table(), self._seen[-1] if self._seen else None
            moved = last is None or any(not same_place(p, last.buffers.get(n)) for n, p in look.buffers.items())
            if last is None or moved or table.word != last.table.word:
                self._seen.append(_Seen(self._looks, look.buffers, table))
        del self._seen[1:-MOST_CHANGES]
        self._pending = []

    def word(self) -> int:
        """This rank's int64 of the step; 0 where there is nothing to compare. After the step's own synchronisation:
        then the accelerator is not waited for."""
        self._settle()
        self._compared = True
        if not self._seen:
            return 0
        if not self._based:
            self._based, self._seen = True, self._seen[-1:]
            return 0
        self._steps += 1
        # When counts too: the change that DDP has spread is the same on all ranks, one look later.
        pairs = itertools.pairwise(self._seen)
        changes = [(now.number, now.table.word) for before, now in pairs if now.table.word != before.table.word]
        return word(str(changes)) if changes else self._seen[-1].table.word

    def judge(self) -> Finding | None:
        """Where the words differ. Collective. None where code may have done it: then the buffers that differ are not
        watched any longer."""
        cpu, nodes = self._attachment.cpu_group, self._attachment.nodes
        gathered = cpu.gather_rows({"looks": self._looks, "changes": self._own_changes()})
        rows = at_first_change(gathered)
        flips = flipped_alone([row["changed"] for row in rows], {name for row in rows for name in row["touched"]})
        if not flips:
            self._drop(rows)
            return None
        words = {rank: str([row["changed"].get(name) for name in flips]) for rank, row in zip(nodes, rows, strict=True)}
        verdict = judge_copies(words, nodes, subject="constant buffers")
        assert verdict is not None, "flipped on one rank alone"
        name, rank = next(iter(flips.items()))
        flip = rows[rank]["changed"][name]["flip"]
        reason = (
            f"{verdict.reason}: bit {flip['flipped_bits'][0]} of element {flip['element']} of {name} flipped on rank "
            f"{rank} since the forward before, after it had been constant, and without a write that PyTorch counts; "
            "only code that writes past PyTorch, on this rank alone, could do the same"
        )
        evidence = {
            "reference_rank": verdict.witnesses[0] if verdict.witnesses else next(r for r in nodes if r != rank),
            "differing_tensors": {str(one): sum(other == one for other in flips.values()) for one in flips.values()},
            "differing_tensor_names": list(flips)[:SHOWN_NAMES],
            "differences": [
                {"rank": one, "tensor": name, "elements": 1, "first": [rows[one]["changed"][name]["flip"]]}
                for name, one in list(flips.items())[:SHOWN_NAMES]
            ],
        }
        return Finding(check=Check.WEIGHTS, verdict=replace(verdict, reason=reason), evidence=evidence)

    def _own_changes(self) -> list[dict[str, Any]]:
        """What this rank saw at each look, since the one before: the same on no two ranks, so it travels."""
        found = []
        for before, now in itertools.pairwise(self._seen):
            changed = {}
            for name in now.table.changed_since(before.table):
                steady = self._steps - self._changed_at.get(name, 0) >= STEADY_STEPS
                flip = self._flip(name, before.table, now) if steady and name in before.table else None
                changed[name] = {"fingerprint": now.table[name], "flip": flip}
            touched = [n for n, place in now.buffers.items() if not same_place(place, before.buffers.get(n))]
            found.append({"look": now.number, "changed": changed, "touched": sorted(touched)})
        return found

    def _flip(self, name: str, old: FingerprintTable, now: _Seen) -> dict[str, Any] | None:
        """The one bit that flipped, where that is what happened and hardly what a program does."""
        buffer = now.buffers[name][0]
        # By now the copies of the other ranks are rank 0's: the tensor holds one of the two values.
        flip = flipped_bit(buffer, Fingerprint.parse(old[name]), Fingerprint.parse(now.table[name]))
        counts = not (buffer.is_floating_point() or buffer.is_complex())
        if flip is None or buffer.numel() == 1 or (counts and flip.bit == 0):
            return None
        return {
            "element": flip.element,
            "bits": f"{flip.bits:#x}",
            "reference_bits": f"{flip.bits_before:#x}",
            "flipped_bits": [flip.bit],
        }

    def _apart_without_a_change(self) -> set[str]:
        """Names of buffers that differ though no rank's has changed: each rank's program writes its own again.
        Collective."""
        rows = self._attachment.cpu_group.gather_rows(dict(self._seen[-1].table) if self._seen else {})
        return {name for row in rows for name in row if len({other.get(name) for other in rows}) > 1}

    def _drop(self, rows: Sequence[Mapping[str, Any]]) -> None:
        differing = {
            name
            for row in rows
            for name, seen in row["changed"].items()
            if any(other["changed"].get(name, {}).get("fingerprint") != seen["fingerprint"] for other in rows)
        }
        self._dropped |= differing or self._apart_without_a_change()
        untouched = differing - {name for row in rows for name in row["touched"]}
        if untouched and self._attachment.rank == 0:
            ranks = [rank for rank, row in enumerate(rows) if untouched & row["changed"].keys()]
            _log.warning(
                "%s changed on rank %s alone, without a write that PyTorch counts, and DDP copies rank 0's to all: not "
                "watched any longer. Code that writes through .data or NumPy does this; where there is none, suspect "
                "that rank's memory",
                ", ".join(sorted(untouched)[:4]),
                ", ".join(map(str, ranks[:8])),
            )


def at_first_change(gathered: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By rank, what it saw at the first look at which a buffer had changed on some rank. Pure.

    gathered: by rank, how many looks it had, and its changes. Where the numbers differ, no look is that of another
    rank: nothing was seen.
    """
    nothing: Mapping[str, Any] = {"changed": {}, "touched": []}
    looks = [one["look"] for row in gathered for one in row["changes"] if one["changed"]]
    if not looks or len({row["looks"] for row in gathered}) > 1:
        return [nothing] * len(gathered)
    return [next((one for one in row["changes"] if one["look"] == min(looks)), nothing) for row in gathered]


def flipped_alone(changed: Sequence[Mapping[str, Mapping[str, Any]]], touched: set[str]) -> dict[str, int]:
    """Name -> rank of what one rank's memory alone can have changed, in order of the names. Pure.

    changed: by rank, the buffers that are not what they were, each with the bit that flipped, if it was one.
    touched: buffers that some rank's program wrote to, as far as PyTorch knows.
    """
    names = sorted({name for row in changed for name in row})
    ranks = {name: [rank for rank, row in enumerate(changed) if name in row] for name in names}
    return {
        name: where[0]
        for name, where in ranks.items()
        if len(where) == 1 and name not in touched and changed[where[0]][name]["flip"] is not None
    }


def _overwritten(model: DistributedDataParallel) -> bool:
    """Whether DDP copies rank 0's buffers to all."""
    # torch before 2.13 has no other word for it.
    copies = getattr(model, "forward_sync_buffers", None)
    return bool((model.broadcast_buffers if copies is None else copies) and model.modules_buffers)
