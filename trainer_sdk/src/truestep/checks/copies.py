"""Comparison of what every rank holds a copy of: weights and optimizer state. After a difference: which element, which
bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from truestep.attachment import Attachment
from truestep.checks.finding import SHOWN_NAMES, Finding
from truestep.checks.held_alike import HeldAlike
from truestep.checks.local_buffers import LocalBuffers
from truestep.collectives import CpuGroup, tensor_bytes
from truestep.contract import Check, NodeName, Rank, Verdict
from truestep.fingerprint import (
    FingerprintTable,
    fingerprint_tensors,
    fingerprint_weights,
    named_state,
    optimizer_state_tensors,
)
from truestep.judge import judge_copies

DIFFED_TENSORS = 3
DIFFED_BYTES = 1 << 28
"""Tensors larger than this are named, not fetched."""
SHOWN_ELEMENTS = 16
_SUBJECTS = {Check.WEIGHTS: "weights", Check.OPTIMIZER_STATE: "optimizer state"}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TrainingCopies:
    """Weights and optimizer state of one model under DDP. Every method is collective."""

    def __init__(
        self,
        attachment: Attachment,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        local_buffers: LocalBuffers,
    ) -> None:
        self._attachment = attachment
        self._module = module
        self._optimizer = optimizer
        self._local_buffers = local_buffers
        self._held_alike = HeldAlike(module)

    @property
    def own_parameters(self) -> frozenset[str]:
        """Parameters that DDP ignores and that are each rank's own: another rank cannot replay a pass with them."""
        return self._held_alike.apart_parameters

    def weights(self) -> FingerprintTable:
        """This rank's, of what healthy replicas agree on."""
        return fingerprint_weights(self._module, without=self._local_buffers.names | self._held_alike.apart)

    def optimizer_state(self) -> FingerprintTable:
        """This rank's state and hyperparameters."""
        return fingerprint_tensors(self._optimizer_leaves())

    def compare(self, check: Check, table: FingerprintTable) -> Finding | None:
        """table: what `weights` or `optimizer_state` gave."""
        cpu, nodes = self._attachment.cpu_group, self._attachment.nodes
        if equal_words(table, cpu):
            if check is Check.WEIGHTS:
                self._held_alike.found_equal()
            return None
        if check is not Check.WEIGHTS:
            return judge_difference(check, table, self._optimizer_leaves, cpu, nodes)
        if self._held_alike.set_apart(table, cpu):
            return self.compare(check, self.weights())
        return judge_difference(check, table, lambda: named_state(self._module), cpu, nodes)

    def compare_all(self) -> Finding | None:
        """The first difference as of now, of the weights and then of the optimizer state."""
        finding = self.compare(Check.WEIGHTS, self.weights())
        if finding is None:
            finding = self.compare(Check.OPTIMIZER_STATE, self.optimizer_state())
        return finding

    def _optimizer_leaves(self) -> Mapping[str, torch.Tensor | str]:
        leaves, apart = optimizer_state_tensors(self._optimizer, self._module), self._held_alike.apart_parameters
        return {n: leaf for n, leaf in leaves.items() if n.rpartition("/")[0] not in apart} if apart else leaves


def equal_words(table: FingerprintTable, cpu: CpuGroup) -> bool:
    """Whether all ranks hold the same. Collective; what a comparison costs where they do."""
    low, high = cpu.extremes([table.word])[0]
    return low == high


def judge_difference(
    check: Check,
    table: FingerprintTable,
    leaves: Callable[[], Mapping[str, torch.Tensor | str]],
    cpu: CpuGroup,
    nodes: Mapping[Rank, NodeName],
) -> Finding | None:
    """Where the words are unequal: find out whose copy differs, where, and in which bits. Collective.

    table: fingerprints of what `leaves` gives, or of those among it that healthy replicas agree on.
    nodes: the ranks of `cpu`, in its order, as a verdict names them, and their nodes.
    """
    rows = cpu.gather_rows({"combined": table.combined})
    words = {rank: row["combined"] for rank, row in zip(nodes, rows, strict=True)}
    verdict = judge_copies(words, nodes, subject=_SUBJECTS[check])
    if verdict is None:
        # The same tensors, placed on other kinds of devices by some ranks: that moves the word alone.
        return None
    return Finding(check=check, verdict=verdict, evidence=_locate(verdict, table, leaves(), cpu, list(nodes)))


def _locate(
    verdict: Verdict,
    table: Mapping[str, str],
    leaves: Mapping[str, torch.Tensor | str],
    cpu: CpuGroup,
    ranks: Sequence[Rank],
) -> dict[str, Any]:
    reference = ranks.index(verdict.witnesses[0]) if verdict.witnesses else 0
    theirs = cpu.gather_rows({"table": dict(table) if cpu.rank == reference else {}})[reference]["table"]
    own = sorted(name for name in {*table, *theirs} if table.get(name) != theirs.get(name))
    rows = cpu.gather_rows({"count": len(own), "names": own[:SHOWN_NAMES]})
    names = sorted({name for row in rows for name in row["names"]})
    differences = []
    for name in names[:DIFFED_TENSORS]:
        leaf = leaves.get(name)
        raw = (
            tensor_bytes(leaf)
            if isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() <= DIFFED_BYTES
            else b""
        )
        expected = cpu.broadcast_bytes(raw, reference)
        found = _diff(leaf, raw, expected) if raw and len(raw) == len(expected) and cpu.rank != reference else {}
        gathered = cpu.gather_rows(found)
        differences += [{"rank": rank, "tensor": name, **row} for rank, row in zip(ranks, gathered, strict=True) if row]
    counts = {str(rank): row["count"] for rank, row in zip(ranks, rows, strict=True) if row["count"]}
    return {
        "reference_rank": ranks[reference],
        "differing_tensors": counts,
        "differing_tensor_names": names[:SHOWN_NAMES],
        "differences": differences[:SHOWN_NAMES],
    }


def _diff(leaf: torch.Tensor | str | None, raw: bytes, expected: bytes) -> dict[str, Any]:
    """Elements of this rank's copy that differ: index, bits of both, and which bits are flipped."""
    if not isinstance(leaf, torch.Tensor) or leaf.element_size() not in _INTEGERS:
        return {}
    integers, width = _INTEGERS[leaf.element_size()], leaf.element_size()
    mine = torch.frombuffer(bytearray(raw), dtype=integers)
    other = torch.frombuffer(bytearray(expected), dtype=integers)
    indices = torch.nonzero(mine != other).flatten()
    if not indices.numel():
        return {}
    mask = (1 << 8 * width) - 1
    elements = []
    for index in indices[:SHOWN_ELEMENTS].tolist():
        have, want = int(mine[index]) & mask, int(other[index]) & mask
        flipped = [bit for bit in range(8 * width) if (have ^ want) >> bit & 1]
        elements.append(
            {"element": index, "bits": f"{have:#x}", "reference_bits": f"{want:#x}", "flipped_bits": flipped}
        )
    return {"elements": indices.numel(), "first": elements}
