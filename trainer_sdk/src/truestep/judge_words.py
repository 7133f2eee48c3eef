"""How verdicts speak of ranks and nodes. Pure, like the judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truestep.contract import NodeName, Rank

ARBITRATION_NODES = 3
"""A third node settles which of two is wrong."""


def third_node_hint(nodes: Mapping[Rank, NodeName]) -> str:
    """What would settle an open verdict."""
    named = sorted(set(nodes.values()))
    if len(named) == 1 and len(nodes) > 1:
        return (
            f"every rank says that it is on node {named[0]}. Where that is not so, set NODE_NAME on each rank before "
            f"attach; else run on at least {ARBITRATION_NODES} nodes: a third one settles which of two is wrong"
        )
    if len(named) < ARBITRATION_NODES:
        return f"run on at least {ARBITRATION_NODES} nodes: a third one settles which of two is wrong"
    return "replay the step's micro-batches on nodes that took no part"


def place_text(ranks: Sequence[Rank], nodes: Mapping[Rank, NodeName]) -> str:
    """The ranks, and where they are; one node where they share it."""
    named = sorted({nodes[rank] for rank in ranks})
    if len(named) == 1 and len(ranks) > 1:
        return f"node {named[0]} ({ranks_text(ranks)})"
    return f"{ranks_text(ranks)} on {', '.join(named[:4])}{' and others' if len(named) > 4 else ''}"


def ranks_text(ranks: Sequence[Rank]) -> str:
    """At most eight of them, and how many more."""
    if not ranks:
        return "no rank"
    shown = ", ".join(map(str, ranks[:8]))
    more = "" if len(ranks) <= 8 else f" and {len(ranks) - 8} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
