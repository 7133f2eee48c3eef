"""A constant buffer that changes in one rank's memory, seen before DDP makes the copies equal again.

Under DDP's default, `broadcast_buffers=True`, rank 0's buffers are copied to every rank in front of the forward: a bit
that flips on rank 0 is then everybody's, and one that flips elsewhere is gone. So every rank fingerprints its buffers
at `start_step`, and the words are compared with the step's all-reduce, before the update.

A copy that differs is no fault by itself: code may write to a buffer on rank 0 and leave the rest to DDP. Writes
through PyTorch raise the tensor's version, or leave another tensor or other memory behind. Those through `.data`,
NumPy, DLPack or ctypes do not, nor does a collective, a batch norm, or a custom operator that does not declare them: no
version proves a fault. A rank is accused where all of this holds, and else the buffer is not watched any longer:

- the buffer was the same at `STEADY_LOOKS` looks in a row;
- since the last one it changed on one rank alone, and on no rank is there a sign of a write;
- one bit flipped, in a buffer of more than one element: code that writes on one rank alone, behind PyTorch's back,
  writes whole buffers, counters or masks. Not the lowest bit of an integer or a bool: that is +-1, or True for False.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
)
from truestep.judge import judge_copies

_log = logging.getLogger(__name__)

STEADY_LOOKS = 8
"""Whatever code writes to more often than that is found out as no constant before anybody can be accused."""


@dataclass(frozen=True)
class _Look:
    """This rank's copies in front of a step."""

    buffers: Mapping[str, Place]
    pending: PendingFingerprints


class ConstantBuffers:
    """Buffers of one model that DDP copies from rank 0 in front of every step. The same names on every rank."""

    def __init__(self, attachment: Attachment, ddp_model: DistributedDataParallel, local_buffers: LocalBuffers) -> None:
        """local_buffers: those that are not compared at all."""
        self._attachment = attachment
        self._model = ddp_model
        self._local_buffers = local_buffers
        self._dropped: set[str] = set()
        """Found to be no constants, by all ranks together."""
        self._looks = 0
        self._changed_at: dict[str, int] = {}
        """Number of the look that found the buffer changed; none for one that never did."""
        self._earlier: tuple[_Look, FingerprintTable] | None = None
        self._latest: tuple[_Look, FingerprintTable] | None = None
        self._begun: _Look | None = None

    def look(self) -> None:
        """In front of a step's first forward. Reads every watched buffer once; no host synchronisation."""
        self._begun = None
        if self._attachment.world_size < 2 or not _overwritten(self._model):
            return  # the comparison after the update finds it
        apart = self._local_buffers.names | self._dropped | ignored_names(self._model.module)
        watched = {name: b for name, b in agreeing_buffers(self._model.module).items() if name not in apart}
        if watched:
            places = {name: place_of(buffer) for name, buffer in watched.items()}
            self._begun = _Look(places, begin_fingerprints(watched))

    def word(self) -> int:
        """This rank's int64 of the step; 0 where there is nothing to compare. After the step's own synchronisation:
        then the accelerator is not waited for."""
        if self._begun is None:
            self._earlier = self._latest = None
            return 0
        if self._earlier is not None and self._latest is not None:
            # No alarm came of that look: what had changed was written to.
            self._changed_at |= dict.fromkeys(self._latest[1].changed_since(self._earlier[1]), self._looks)
        self._earlier, self._latest = self._latest, (self._begun, self._begun.pending.table())
        self._begun = None
        if self._earlier is None:
            self._looks, self._changed_at = 0, {}
            return 0
        self._looks += 1
        return self._latest[1].word

    def judge(self) -> Finding | None:
        """Where the words differ. Collective. None where code may have done it: then the buffers that differ are not
        watched any longer."""
        cpu, nodes = self._attachment.cpu_group, self._attachment.nodes
        rows = cpu.gather_rows(self._own_row())
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
            f"{rank} since the step before, after it had been constant, and without a write that PyTorch counts; only "
            "code that writes past PyTorch, on this rank alone, could do the same"
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

    def _own_row(self) -> dict[str, Any]:
        """What this rank saw since the look before: the same on no two ranks, so it travels."""
        if self._earlier is None or self._latest is None:
            return {"changed": {}, "touched": []}
        (before, old), (now, new) = self._earlier, self._latest
        touched = [name for name, place in now.buffers.items() if not same_place(place, before.buffers.get(name))]
        changed = {}
        for name in new.changed_since(old):
            steady = self._looks - self._changed_at.get(name, 0) >= STEADY_LOOKS
            flip = self._flip(name, old, new) if steady and name in old else None
            changed[name] = {"fingerprint": new[name], "flip": flip}
        return {"changed": changed, "touched": sorted(touched)}

    def _flip(self, name: str, old: FingerprintTable, new: FingerprintTable) -> dict[str, Any] | None:
        """The one bit that flipped, where that is what happened and hardly what a program does."""
        assert self._latest is not None
        buffer = self._latest[0].buffers[name][0]
        # By now the copies of the other ranks are rank 0's: the tensor holds one of the two values.
        flip = flipped_bit(buffer, Fingerprint.parse(old[name]), Fingerprint.parse(new[name]))
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
        own = dict(self._latest[1]) if self._latest is not None else {}
        rows = self._attachment.cpu_group.gather_rows(own)
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
