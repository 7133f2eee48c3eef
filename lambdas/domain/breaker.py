"""The circuit breaker: how many nodes may be quarantined at once."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClaimAnswer:
    """Whether the nodes are this incident's now. All of them or none."""

    granted: bool
    reason: str
    tripped: bool = False
    """Refused by the circuit breaker, not by another incident's claim."""


def quarantine_limit(*, max_nodes: int, max_percent: float, group_size: int) -> int:
    """min(N, max(1, floor(P% of the instance group))): rounded down, but always room for one bad node."""
    if group_size < 0:
        raise ValueError(f"group_size is a count of nodes, got {group_size}")
    return min(max_nodes, max(1, math.floor(group_size * max_percent / 100)))
