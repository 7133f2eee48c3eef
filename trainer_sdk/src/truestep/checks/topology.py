"""Who replays whom: rings over the nodes that rotate until every pair has met, and third nodes as arbiters. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truestep.contract import NodeName, Rank, TruestepError
from truestep.judge import Replayed


class TopologyError(TruestepError):
    """The ranks are spread over nodes in a way that audits cannot pair."""


class Ring:
    """Pairs every rank with one at the same local index on another node.

    Audit k replays at distance 1 + k mod (nodes - 1), so that every pair of nodes meets once in as many audits. With a
    single node the ring goes over its ranks: faults are still detected, but there is nobody to arbitrate.
    Raises `TopologyError` where nodes hold different numbers of ranks.
    """

    def __init__(self, nodes: Mapping[Rank, NodeName]) -> None:
        """nodes: rank -> node, for every rank of the data-parallel group."""
        self._nodes = dict(nodes)
        members: dict[NodeName, list[Rank]] = {}
        for rank in sorted(nodes):
            members.setdefault(nodes[rank], []).append(rank)
        sizes = {node: len(ranks) for node, ranks in members.items()}
        if len(set(sizes.values())) > 1:
            raise TopologyError(
                f"audits pair ranks of the same local index, but nodes hold different numbers of ranks: {sizes}; "
                "start the same number of processes on every node, or set Schedule(audit_every=None)"
            )
        self._places = list(members.values()) if len(members) > 1 else [[rank] for rank in sorted(nodes)]
        self._where = {rank: (i, j) for i, ranks in enumerate(self._places) for j, rank in enumerate(ranks)}
        count = len(self._places)
        self._rounds = [_producers(count, distance) for distance in range(1, count)] or [[0]]

    @property
    def alone(self) -> bool:
        """A single rank, which replays itself: that a device agrees with itself clears nothing."""
        return len(self._where) == 1

    def producer(self, replayer: Rank, audit_number: int) -> Rank:
        """Whose micro-batch `replayer` replays in this audit."""
        place, local = self._where[replayer]
        return self._places[self._rounds[audit_number % len(self._rounds)][place]][local]

    def transfers(self, audit_number: int) -> list[tuple[int, int]]:
        """(producer, replayer) of every edge."""
        return [(self.producer(rank, audit_number), rank) for rank in sorted(self._where)]

    def arbiters(self, edge: Replayed) -> list[Rank]:
        """Third parties for a mismatching edge: one, or two from four nodes on; none with two nodes or one."""
        return self.others(
            edge.producer, {self._nodes[edge.producer], self._nodes[edge.replayer]}, 2 if self._count >= 4 else 1
        )

    def others(self, near: Rank, excluded: set[NodeName], wanted: int) -> list[Rank]:
        """Up to `wanted` ranks on distinct nodes outside `excluded`, starting behind `near` at its local index."""
        place, local = self._where[near]
        found: list[Rank] = []
        seen = set(excluded)
        for offset in range(1, len(self._places)):
            candidate = self._places[(place + offset) % len(self._places)][local]
            if self._nodes[candidate] not in seen and len(found) < wanted:
                seen.add(self._nodes[candidate])
                found.append(candidate)
        return found

    @property
    def _count(self) -> int:
        return len(set(self._nodes.values()))


def _producers(count: int, distance: int) -> list[int]:
    """Whom each of `count` places replays. Nobody replays the place that replays it, but for two places."""
    if 2 * distance != count or count == 2:
        return [(place + distance) % count for place in range(count)]
    # Straight across a ring of even length both edges of a place would join the same pair, and nobody could be named.
    # So the opposite pairs meet on one cycle through all places: 0, n/2, 1, n/2 + 1, 2, ...
    half = count // 2
    return [place + half if place < half else (place + 1) % half for place in range(count)]


def arbitration_plan(ring: Ring, edges: Sequence[Replayed]) -> dict[Rank, list[Rank]]:
    """Producer -> arbiters, for mismatching edges. The same on every rank."""
    return {edge.producer: ring.arbiters(edge) for edge in edges}
