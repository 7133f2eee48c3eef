"""Who replays whom: everyone once an audit, never back and forth, and every pair of nodes before long."""

from __future__ import annotations

from itertools import combinations

import pytest

from truestep.checks.topology import Ring
from truestep.contract import NodeName, Rank


def ring(nodes: int, per_node: int = 1) -> tuple[Ring, list[Rank]]:
    placed = {Rank(rank): NodeName(f"node-{rank // per_node}") for rank in range(nodes * per_node)}
    return Ring(placed), sorted(placed)


@pytest.mark.parametrize("count", [*range(2, 18), 31, 32])
def test_an_audit_replays_everyone_once_on_another_node_and_never_back_and_forth(count: int) -> None:
    pairs, ranks = ring(count)
    for number in range(2 * count):
        producers = [pairs.producer(rank, number) for rank in ranks]
        assert sorted(producers) == ranks
        assert all(producer != rank for rank, producer in enumerate(producers))
        if count > 2:
            back = [rank for rank, producer in enumerate(producers) if producers[producer] == rank]
            assert back == [], "both edges of these ranks join one pair: nobody could be named"


@pytest.mark.parametrize("count", [*range(2, 18), 31, 32])
def test_every_pair_of_nodes_meets_within_one_round_of_audits(count: int) -> None:
    pairs, ranks = ring(count)
    met = {frozenset((rank, pairs.producer(rank, number))) for number in range(count - 1) for rank in ranks}
    assert met == {frozenset(pair) for pair in combinations(ranks, 2)}


def test_several_ranks_a_node_meet_their_like_on_every_other_node() -> None:
    pairs, ranks = ring(4, per_node=2)
    met = {frozenset((rank, pairs.producer(rank, number))) for number in range(3) for rank in ranks}
    alike = {frozenset(pair) for pair in combinations(ranks, 2) if (pair[0] - pair[1]) % 2 == 0}
    assert met == alike


def test_one_node_alone_pairs_its_ranks_and_one_rank_itself() -> None:
    pairs, ranks = ring(1, per_node=3)
    assert {pairs.producer(rank, 0) for rank in ranks} == set(ranks)
    assert all(pairs.producer(rank, number) != rank for rank in ranks for number in range(4))
    alone, _ = ring(1)
    assert alone.producer(Rank(0), 5) == 0
