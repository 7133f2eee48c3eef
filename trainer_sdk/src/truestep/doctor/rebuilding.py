"""Whether `rebuild_batch(step, rank)` gives the batch that was trained on, twice, here and on another node."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from truestep import rng
from truestep.attachment import Attachment
from truestep.checks.topology import Ring
from truestep.contract import Rank, Step
from truestep.doctor.diagnosis import Level, Observation
from truestep.fingerprint.state import fingerprint_leaves
from truestep.replay import RebuildBatch

_SHOWN_LEAVES = 512
"""Leaves of a batch whose fingerprints travel to another node."""
_WAY_OUT = (
    "or give None for rebuild_batch: audits then ship the batch that train fetched, or your loop gave to start_step"
)


def examine_rebuilding(
    attachment: Attachment, ring: Ring, rebuild_batch: RebuildBatch, batch: Any, step: Step
) -> list[Observation]:
    """batch: what this rank trains on; None where only `rebuild_batch` gives it. Collective.

    A failure on any rank is one observation, with the first rank that has it.
    """
    me = attachment.rank
    own = rng.capture()
    try:
        complaint, table = _at_home(rebuild_batch, batch, step, me)
        rows = attachment.cpu_group.gather_rows(
            {"complaint": complaint, "leaves": dict(list(table.items())[:_SHOWN_LEAVES])}
        )
        producer = ring.producer(me, 0)
        if not any(row["complaint"] for row in rows) and producer != me:
            complaint = _away(rebuild_batch, rows[producer]["leaves"], step, producer)
        rows = attachment.cpu_group.gather_rows({"complaint": complaint})
    finally:
        rng.restore(own)
    for rank, row in enumerate(rows):
        if row["complaint"]:
            where = f"rank {rank} on {attachment.nodes[Rank(rank)]}"
            message = f"{where}: {row['complaint']}, {_WAY_OUT}"
            return [Observation(subject="rebuild_batch", level=Level.REFUSED, message=message)]
    return []


def _at_home(rebuild_batch: RebuildBatch, batch: Any, step: Step, me: Rank) -> tuple[str, dict[str, str]]:
    """(complaint or nothing, fingerprint of every leaf) on the rank whose batch it is."""
    call = f"rebuild_batch({step}, {me})"
    try:
        first = fingerprint_leaves(rebuild_batch(step, me))
        _disturb_generators()
        again = fingerprint_leaves(rebuild_batch(step, me))
    except Exception as error:
        return (
            f"{call} raised {type(error).__name__}: {error}; it is called with (step, rank) and must be able to make "
            "any rank's batch again",
            {},
        )
    leaf = _differing(first, again)
    if leaf:
        return (
            f"{call} gives another {leaf} at every call, so something in it is not seeded (augmentation, shuffling, "
            "dropout of words, worker order): draw from torch.Generator().manual_seed(f(step, rank)) instead of the "
            "global random numbers",
            {},
        )
    trained = fingerprint_leaves(batch) if batch is not None else first
    leaf = _differing(trained, first)
    if leaf:
        return (
            f"{call} gives another {leaf} than the batch that is trained on: let the data loader and rebuild_batch "
            "call the same function of (step, rank)",
            {},
        )
    return "", first


def _away(rebuild_batch: RebuildBatch, theirs: Mapping[str, str], step: Step, producer: Rank) -> str:
    call = f"rebuild_batch({step}, {producer})"
    try:
        mine = fingerprint_leaves(rebuild_batch(step, producer))
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {error}; every rank must be able to make any rank's batch"
    leaf = _differing(theirs, dict(list(mine.items())[:_SHOWN_LEAVES]))
    if leaf:
        return (
            f"{call} gives another {leaf} here than on rank {producer}: data files, their order, or the tokenizer "
            "differ between these nodes, or it depends on the rank that calls it; make it depend on its arguments alone"
        )
    return ""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first leaf that is not the same; empty where all are."""
    for path in {**one, **other}:
        if one.get(path) != other.get(path):
            return f"batch{path}"
    return ""


def _disturb_generators() -> None:
    """Moves every global generator on, so that what draws from them shows."""
    random.seed(1)
    torch.manual_seed(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1)
