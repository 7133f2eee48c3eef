"""The judge over many nodes, nodes of several ranks, and several faults at once: never a healthy rank convicted.

Up to 16 nodes every single fault is enumerated in test_judge.py; here 3 to 64 nodes are sampled, with evidence made
by the product's own ring and arbitration plan. A faulty rank computes, wherever it is hit, a wrong value that depends
on the rank, the micro-batch and (for an unsteady fault) the pass: two devices never give the same wrong bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from truestep.checks.topology import Ring, arbitration_plan
from truestep.contract import NodeName, Rank, Verdict, VerdictKind
from truestep.judge import (
    AuditEvidence,
    Recorded,
    Replayed,
    judge_audit,
    judge_copies,
    mismatching_edges,
)
from truestep.judge_nonfinite import NonfiniteReplay, judge_nonfinite

Compute = Callable[[int, int, str], str]
FAST = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
NODES = st.one_of(st.integers(3, 16), st.sampled_from([17, 24, 31, 32, 48, 63, 64]))
PER_NODE = st.sampled_from([1, 1, 2, 4])


def placed(count: int, per_node: int) -> dict[Rank, NodeName]:
    return {Rank(rank): NodeName(f"node-{rank // per_node}") for rank in range(count * per_node)}


def audit(nodes: dict[Rank, NodeName], number: int, compute: Compute) -> tuple[Verdict | None, bool]:
    """(verdict of a whole audit, whether anything in it contradicted its record)."""
    ring = Ring(nodes)
    recorded = {
        rank: Recorded(rank=rank, node=nodes[rank], inputs=f"in-{rank}", result=compute(rank, rank, "recorded"))
        for rank in nodes
    }

    def run(rank: int, source: int, phase: str) -> Replayed:
        return Replayed(
            producer=Rank(source), replayer=Rank(rank), inputs=f"in-{source}", result=compute(rank, source, phase)
        )

    replays = [run(rank, ring.producer(rank, number), "ring") for rank in nodes]
    edges = mismatching_edges(recorded, replays)
    plan = arbitration_plan(ring, edges)
    arbitration = [run(arbiter, source, "arbiter") for source, arbiters in plan.items() for arbiter in arbiters]
    parties = [(party, edge.producer) for edge in edges for party in (edge.producer, edge.replayer)]
    parties += [(replay.replayer, replay.producer) for replay in arbitration]
    reruns = [run(rank, source, "rerun") for rank, source in parties]
    evidence = AuditEvidence(recorded=recorded, ring=replays, arbitration=arbitration, reruns=reruns)
    return judge_audit(evidence), bool(edges)


def faulty(bad: set[int], seed: int, probability: float, *, steady: bool) -> Compute:
    """Each pass of a faulty rank is hit with a probability; a steady fault always gives the same wrong value."""

    def compute(rank: int, source: int, phase: str) -> str:
        chance = random.Random(f"{seed} {rank} {source} {phase}")  # noqa: S311
        if rank not in bad or chance.random() >= probability:
            return f"right-{source}"
        return f"wrong-{rank}-{source}" + ("" if steady else f"-{phase}")

    return compute


@FAST
@given(
    count=NODES,
    per_node=PER_NODE,
    number=st.integers(0, 200),
    seed=st.integers(0, 1 << 30),
    probability=st.sampled_from([1.0, 0.7, 0.3]),
    steady=st.booleans(),
)
def test_one_faulty_rank_is_convicted_whenever_anything_shows(
    count: int, per_node: int, number: int, seed: int, probability: float, steady: bool
) -> None:
    nodes = placed(count, per_node)
    bad = seed % len(nodes)
    verdict, showed = audit(nodes, number, faulty({bad}, seed, probability, steady=steady))
    assert (verdict is not None) == showed
    if verdict is not None:
        assert (verdict.kind, verdict.suspects) == (VerdictKind.CONCLUSIVE, (bad,))
        assert bad not in verdict.witnesses


@FAST
@given(
    count=NODES,
    per_node=PER_NODE,
    number=st.integers(0, 200),
    seed=st.integers(0, 1 << 30),
    how_many=st.integers(2, 3),
    probability=st.sampled_from([1.0, 0.7, 0.3]),
    steady=st.booleans(),
)
def test_several_faults_never_convict_a_healthy_rank(
    count: int, per_node: int, number: int, seed: int, how_many: int, probability: float, steady: bool
) -> None:
    nodes = placed(count, per_node)
    bad = set(random.Random(seed).sample(range(len(nodes)), min(how_many, len(nodes) - 1)))  # noqa: S311
    verdict, showed = audit(nodes, number, faulty(bad, seed, probability, steady=steady))
    assert (verdict is not None) == showed
    if verdict is None:
        return
    if verdict.kind is VerdictKind.CONCLUSIVE:
        assert set(verdict.suspects) <= bad
    elif verdict.kind is VerdictKind.AMBIGUOUS:
        assert set(verdict.suspects) & bad
    else:
        # Only where no device in sight repeats itself, and that accuses nobody.
        assert verdict.kind is VerdictKind.NONDETERMINISTIC
        assert not steady
        assert verdict.suspects == ()


@FAST
@given(count=NODES, per_node=PER_NODE, number=st.integers(0, 200), seed=st.integers(0, 1 << 30))
def test_a_wrong_replayer_with_a_wrong_arbiter_leaves_the_producer_unconvicted(
    count: int, per_node: int, number: int, seed: int
) -> None:
    """The worst pair: the edge's replayer and the node that is asked about it."""
    nodes = placed(count, per_node)
    ring = Ring(nodes)
    replayer = Rank(seed % len(nodes))
    edge = Replayed(producer=ring.producer(replayer, number), replayer=replayer, inputs="x", result="y")
    bad = {int(replayer), int(ring.arbiters(edge)[0])}
    verdict, showed = audit(nodes, number, faulty(bad, seed, 1.0, steady=True))
    assert showed
    assert verdict is not None
    assert verdict.kind is VerdictKind.AMBIGUOUS, "three different values, or outliers on two nodes: nobody is certain"
    assert bad <= set(verdict.suspects)


@FAST
@given(count=NODES, per_node=PER_NODE, seed=st.integers(0, 1 << 30), how_many=st.integers(1, 2))
def test_copies_convict_only_those_that_differ_from_most_nodes(
    count: int, per_node: int, seed: int, how_many: int
) -> None:
    nodes = placed(count, per_node)
    bad = set(random.Random(seed).sample(range(len(nodes)), how_many))  # noqa: S311
    words = {rank: f"wrong-{rank}" if rank in bad else "right" for rank in nodes}
    verdict = judge_copies(words, nodes, subject="weights")
    assert verdict is not None
    if verdict.kind is VerdictKind.CONCLUSIVE:
        assert set(verdict.suspects) == bad
        assert not set(verdict.witnesses) & bad
    else:
        assert bad <= set(verdict.suspects)
    if how_many == 1:
        assert verdict.kind is VerdictKind.CONCLUSIVE


@FAST
@given(count=NODES, per_node=PER_NODE, seed=st.integers(0, 1 << 30), probability=st.sampled_from([1.0, 0.5]))
def test_a_replayer_that_invents_nan_convicts_nobody_else(
    count: int, per_node: int, seed: int, probability: float
) -> None:
    """A healthy rank whose gradient is NaN for everyone (data), and replays of which a faulty rank's come out wrong."""
    nodes = placed(count, per_node)
    chance = random.Random(seed)  # noqa: S311
    accused, bad = Rank(chance.randrange(len(nodes))), Rank(chance.randrange(len(nodes)))
    others = Ring(nodes).others(accused, {nodes[accused]}, 2)
    replays = [
        NonfiniteReplay(producer=accused, replayer=rank, nonfinite=rank != bad or chance.random() >= probability)
        for rank in others
    ]
    verdict = judge_nonfinite(nodes=nodes, local=[accused], reduced=list(nodes), replays=replays)
    assert verdict.kind in (VerdictKind.NUMERICS, VerdictKind.AMBIGUOUS)
