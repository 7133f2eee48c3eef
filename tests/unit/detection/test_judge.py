"""The judge never convicts a healthy rank: every single fault is located or left open, and two faults never mislead it.

The world below is a model of replicas: a healthy rank computes the right value of a micro-batch, a faulty one computes
a wrong value of its own whenever its fault hits. Which passes are hit is enumerated or drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.checks.topology import Ring, TopologyError, arbitration_plan
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

BOTH = (False, True)
Hits = Callable[[int, str], bool]


def placed(ranks: int, per_node: int = 1) -> dict[Rank, NodeName]:
    return {Rank(rank): NodeName(f"node-{rank // per_node}") for rank in range(ranks)}


def _hit(pattern: dict[str, bool], _rank: int, phase: str) -> bool:
    return pattern[phase]


def audit(nodes: dict[Rank, NodeName], number: int, compute: Callable[[int, int, str], str]) -> Verdict | None:
    """A whole audit, with the product's ring, plan and judge. compute(rank, micro-batch, phase) -> result."""
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
    reruns = [run(edge.replayer, edge.producer, "rerun") for edge in edges]
    reruns += [run(edge.producer, edge.producer, "rerun") for edge in edges]
    reruns += [run(replay.replayer, replay.producer, "rerun") for replay in arbitration]
    return judge_audit(AuditEvidence(recorded=recorded, ring=replays, arbitration=arbitration, reruns=reruns))


def faulty(ranks: set[int], hits: Hits) -> Callable[[int, int, str], str]:
    """Faulty ranks compute a value of their own where they are hit; two faults never give the same wrong bits."""

    def compute(rank: int, source: int, phase: str) -> str:
        return f"wrong-{rank}-{source}" if rank in ranks and hits(rank, phase) else f"right-{source}"

    return compute


@pytest.mark.parametrize("count", range(3, 17))
def test_every_single_fault_is_convicted_exactly_when_it_shows(count: int) -> None:
    """All patterns of hit phases, all faulty ranks, all ring distances."""
    nodes = placed(count)
    for number, bad, in_record, in_ring, in_rerun in product(range(3), range(count), BOTH, BOTH, BOTH):
        pattern: dict[str, bool] = {"recorded": in_record, "ring": in_ring, "rerun": in_rerun, "arbiter": True}
        hits = partial(_hit, pattern)
        verdict = audit(nodes, number, faulty({bad}, hits))
        if not (in_record or in_ring):
            assert verdict is None
        else:
            assert verdict is not None
            assert (verdict.kind, verdict.suspects) == (VerdictKind.CONCLUSIVE, (bad,)), (number, bad, pattern)
            assert bad not in verdict.witnesses


@settings(max_examples=400)
@given(data=st.data(), count=st.integers(3, 12), number=st.integers(0, 20))
def test_two_faults_never_convict_a_healthy_rank(data: st.DataObject, count: int, number: int) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    hits = {
        (rank, phase): data.draw(st.booleans()) for rank in bad for phase in ("recorded", "ring", "arbiter", "rerun")
    }
    verdict = audit(placed(count), number, faulty(bad, lambda rank, phase: hits[rank, phase]))
    if verdict is not None:
        assert verdict.kind in (VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS)
        if verdict.kind is VerdictKind.CONCLUSIVE:
            assert set(verdict.suspects) <= bad
        else:
            assert set(verdict.suspects) & bad, "an ambiguous verdict must still hold a faulty rank"


def test_faults_in_0_and_2_of_4_do_not_convict_the_healthy_ranks_where_their_edges_meet() -> None:
    verdict = audit(placed(4), 0, faulty({0, 2}, lambda _rank, _phase: True))
    assert verdict is not None
    assert verdict.kind is VerdictKind.AMBIGUOUS
    assert {0, 2} <= set(verdict.suspects)


def test_two_ranks_of_one_node_convict_the_node() -> None:
    verdict = audit(placed(6, per_node=2), 0, faulty({2, 3}, lambda _rank, _phase: True))
    assert verdict is not None
    assert (verdict.kind, verdict.suspects, verdict.rule) == (VerdictKind.CONCLUSIVE, (2, 3), "arbitrated_node")
    assert "node node-1" in verdict.reason


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_fewer_than_three_nodes_detect_and_name_nobody_for_certain(per_node: int) -> None:
    nodes = placed(2 * per_node, per_node)
    verdict = audit(nodes, 0, faulty({0}, lambda _rank, _phase: True))
    assert verdict is not None
    assert verdict.kind is VerdictKind.AMBIGUOUS
    assert 0 in verdict.suspects
    assert "3 nodes" in verdict.settle


def test_a_kernel_that_never_repeats_is_software_and_accuses_nobody() -> None:
    calls = iter(range(10_000))
    verdict = audit(placed(3), 0, lambda _rank, _source, _phase: f"random-{next(calls)}")
    assert verdict is not None
    assert (verdict.kind, verdict.suspects) == (VerdictKind.NONDETERMINISTIC, ())


def test_no_two_alike_but_a_device_repeats_itself_is_ambiguous_and_not_software() -> None:
    """Wrong replayer plus wrong arbiter: three different values, each repeated."""
    verdict = audit(placed(3), 0, faulty({1, 2}, lambda _rank, _phase: True))
    assert verdict is not None
    assert verdict.kind is VerdictKind.AMBIGUOUS


def test_second_runs_that_all_differ_are_software_though_third_nodes_agree() -> None:
    """A private generator: every replay draws anew, and the first replays of all healthy ranks draw the same."""

    def compute(rank: int, source: int, phase: str) -> str:
        return (
            f"{phase if phase in ('recorded', 'rerun') else 'replayed'} {source}" if source == 1 else f"right {source}"
        )

    verdict = audit(placed(4), 0, compute)
    assert verdict is not None
    assert (verdict.kind, verdict.rule, verdict.suspects) == (VerdictKind.NONDETERMINISTIC, "nondeterministic", ())


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_replays_that_agree_against_every_record_are_software(count: int) -> None:
    def compute(_rank: int, source: int, phase: str) -> str:
        return f"{'recorded' if phase == 'recorded' else 'replayed'} {source}"

    verdict = audit(placed(count), 0, compute)
    assert verdict is not None
    assert (verdict.kind, verdict.rule, verdict.suspects) == (VerdictKind.NONDETERMINISTIC, "replay_differs", ())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_edge_mismatching_is_not_software_while_one_rank_repeats_its_record(count: int) -> None:
    """All ranks but one were hit in their record alone, and the healthy one's replayer is wrong."""

    def compute(rank: int, source: int, phase: str) -> str:
        wrong = (source != 0 and phase == "recorded") or (source == 0 and rank != 0)
        return f"{'wrong' if wrong else 'right'} {source}"

    verdict = audit(placed(count), 0, compute)
    assert verdict is not None
    assert verdict.kind is VerdictKind.AMBIGUOUS
    assert verdict.suspects


def guilty_with_odd_inputs(arbiters: tuple[int, ...]) -> AuditEvidence:
    """Rank 1's record is wrong, and whatever it replays starts from something else."""
    nodes = placed(4)
    recorded = {
        r: Recorded(rank=r, node=nodes[r], inputs=f"in-{r}", result="wrong" if r == 1 else f"right-{r}") for r in nodes
    }

    def run(producer: int, replayer: int) -> Replayed:
        inputs = "other" if replayer == 1 else f"in-{producer}"
        return Replayed(producer=Rank(producer), replayer=Rank(replayer), inputs=inputs, result=f"right-{producer}")

    return AuditEvidence(
        recorded=recorded,
        ring=[run((replayer + 1) % 4, replayer) for replayer in range(4)],
        arbitration=[run(1, arbiter) for arbiter in arbiters],
        reruns=[run(1, 0), run(1, 1), *(run(1, arbiter) for arbiter in arbiters)],
    )


def test_wrong_inputs_of_the_guilty_rank_do_not_acquit_it() -> None:
    verdict = judge_audit(guilty_with_odd_inputs((2, 3)))
    assert verdict is not None
    assert (verdict.kind, verdict.rule, verdict.suspects) == (VerdictKind.CONCLUSIVE, "arbitrated", (1,))
    assert verdict.witnesses == (0, 2, 3)


def test_the_rank_that_all_wrong_inputs_have_in_common_is_a_suspect_where_nothing_is_settled() -> None:
    verdict = judge_audit(guilty_with_odd_inputs(()))
    assert verdict is not None
    assert (verdict.kind, verdict.suspects) == (VerdictKind.AMBIGUOUS, (0, 1))
    elsewhere = guilty_with_odd_inputs(())
    moved = [replace(r, inputs="other" if r.replayer == 2 else f"in-{r.producer}") for r in elsewhere.ring]
    verdict = judge_audit(replace(elsewhere, ring=moved, reruns=()))
    assert verdict is not None
    assert (verdict.kind, verdict.suspects) == (VerdictKind.AMBIGUOUS, (0, 1, 2, 3))


def test_wrong_inputs_alone_or_of_unrelated_ranks_accuse_nobody() -> None:
    guilty = guilty_with_odd_inputs((2, 3))
    alone = replace(guilty, recorded={**guilty.recorded, Rank(1): replace(guilty.recorded[Rank(1)], result="right-1")})
    unrelated = replace(
        guilty, ring=[*guilty.ring[:2], *(replace(replay, inputs="other") for replay in guilty.ring[2:])]
    )
    for evidence in (alone, unrelated):
        verdict = judge_audit(evidence)
        assert verdict is not None
        assert (verdict.kind, verdict.suspects) == (VerdictKind.INPUTS, ())
        assert "nobody is accused" in verdict.reason


def test_a_failed_arbiter_leaves_the_edge_open_and_a_failed_replay_is_no_mismatch() -> None:
    nodes = placed(4)
    recorded = {r: Recorded(rank=r, node=nodes[r], inputs=f"in-{r}", result="right") for r in nodes}
    failed = Replayed(producer=Rank(1), replayer=Rank(0), failed="out of memory")
    assert judge_audit(AuditEvidence(recorded=recorded, ring=[failed])) is None
    wrong = Replayed(producer=Rank(1), replayer=Rank(0), inputs="in-1", result="wrong")
    arbiters = [
        Replayed(producer=Rank(1), replayer=Rank(2), inputs="in-1", result="right"),
        Replayed(producer=Rank(1), replayer=Rank(3), failed="out of memory"),
    ]
    verdict = judge_audit(AuditEvidence(recorded=recorded, ring=[wrong], arbitration=arbiters))
    assert verdict is not None
    assert (verdict.kind, verdict.suspects) == (VerdictKind.AMBIGUOUS, (0, 1))


@pytest.mark.parametrize("count", range(3, 17))
def test_one_wrong_copy_is_named_by_the_majority_of_nodes(count: int) -> None:
    for bad in range(count):
        words = {rank: "flipped" if rank == bad else "right" for rank in placed(count)}
        verdict = judge_copies(words, placed(count), subject="weights")
        assert verdict is not None
        assert (verdict.kind, verdict.suspects) == (VerdictKind.CONCLUSIVE, (bad,))


@given(data=st.data(), count=st.integers(3, 10))
def test_two_wrong_copies_never_convict_a_healthy_one(data: st.DataObject, count: int) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    words = {rank: f"wrong-{rank}" if rank in bad else "right" for rank in placed(count)}
    verdict = judge_copies(words, placed(count), subject="weights")
    assert verdict is not None
    if verdict.kind is VerdictKind.CONCLUSIVE:
        assert set(verdict.suspects) == bad
    else:
        assert bad <= set(verdict.suspects)


def test_a_node_whose_ranks_differ_votes_with_their_majority_or_not_at_all() -> None:
    nodes = placed(6, per_node=2)
    split = judge_copies({**dict.fromkeys(nodes, "right"), Rank(3): "flipped"}, nodes, subject="weights")
    assert split is not None
    assert (split.kind, split.suspects) == (VerdictKind.CONCLUSIVE, (3,))
    even = judge_copies(
        {Rank(0): "a", Rank(1): "b", Rank(2): "a", Rank(3): "b", Rank(4): "a", Rank(5): "a"}, nodes, subject="weights"
    )
    assert even is not None
    assert even.kind is VerdictKind.AMBIGUOUS, "one voting node of three is no majority"


def test_equal_copies_give_no_verdict_and_two_nodes_no_conviction() -> None:
    assert judge_copies(dict.fromkeys(placed(4), "right"), placed(4), subject="weights") is None
    verdict = judge_copies({Rank(0): "a", Rank(1): "b"}, placed(2), subject="weights")
    assert verdict is not None
    assert (verdict.kind, verdict.suspects) == (VerdictKind.AMBIGUOUS, (0, 1))


def nonfinite(producer: int, replays: dict[int, bool]) -> list[NonfiniteReplay]:
    return [
        NonfiniteReplay(producer=Rank(producer), replayer=Rank(rank), nonfinite=flag) for rank, flag in replays.items()
    ]


def test_nonfinite_values_are_blamed_only_where_two_other_nodes_do_not_reproduce_them() -> None:
    nodes = placed(4)
    one, everyone = [Rank(1)], list(nodes)

    def judged(local: list[Rank], replays: list[NonfiniteReplay]) -> tuple[VerdictKind, tuple[Rank, ...]]:
        verdict = judge_nonfinite(nodes=nodes, local=local, reduced=everyone, replays=replays)
        return verdict.kind, verdict.suspects

    assert judged(one, nonfinite(1, {2: False, 3: False})) == (VerdictKind.CONCLUSIVE, (1,))
    assert judged(one, nonfinite(1, {2: True, 3: True})) == (VerdictKind.NUMERICS, ())
    assert judged(one, nonfinite(1, {2: True, 3: False})) == (VerdictKind.AMBIGUOUS, (1,))
    assert judged(one, nonfinite(1, {2: False})) == (VerdictKind.AMBIGUOUS, (1,))
    assert judged(one, nonfinite(1, {1: False, 2: False})) == (VerdictKind.AMBIGUOUS, (1,)), (
        "its own rerun clears nobody"
    )
    assert judged(one, []) == (VerdictKind.AMBIGUOUS, (1,))
    raised = [NonfiniteReplay(producer=Rank(1), replayer=Rank(rank), failed="KeyError: 'labels'") for rank in (2, 3)]
    assert judged(one, raised) == (VerdictKind.AMBIGUOUS, ()), "what was replayed is not what it ran"
    assert judged(one, [raised[0], *nonfinite(1, {3: False})]) == (VerdictKind.AMBIGUOUS, ())


def test_a_finite_replay_of_one_micro_batch_of_several_convicts_nobody() -> None:
    def judged(replays: list[NonfiniteReplay], partly: set[Rank]) -> tuple[VerdictKind, tuple[Rank, ...]]:
        verdict = judge_nonfinite(nodes=placed(4), local=[Rank(1)], reduced=[Rank(1)], replays=replays, partly=partly)
        return verdict.kind, verdict.suspects

    finite, reproduced = nonfinite(1, {2: False, 3: False}), nonfinite(1, {2: True, 3: True})
    assert judged(finite, {Rank(1)}) == (VerdictKind.AMBIGUOUS, (1,))
    assert judged(finite, {Rank(2)}) == (VerdictKind.CONCLUSIVE, (1,))
    assert judged(reproduced, {Rank(1)}) == (VerdictKind.NUMERICS, ())


@pytest.mark.parametrize("nodes", [placed(2), placed(3), placed(4, per_node=2), placed(8)])
def test_what_every_rank_has_at_once_and_no_replay_shows_is_of_the_program(nodes: dict[Rank, NodeName]) -> None:
    """A term added to the loss outside compute_loss; no single device spoils what the others compute alone."""
    ring = Ring(nodes)
    others = {rank: ring.others(rank, {nodes[rank]}, 2) for rank in nodes}
    finite = [replay for rank in nodes for replay in nonfinite(rank, dict.fromkeys(others[rank], False))]

    def judged(local: list[Rank], replays: list[NonfiniteReplay], partly: set[Rank] | None = None) -> Verdict:
        return judge_nonfinite(nodes=nodes, local=local, reduced=list(nodes), replays=replays, partly=partly or set())

    for partly in (set(), {Rank(0)}):
        verdict = judged(list(nodes), finite, partly)
        assert (verdict.kind, verdict.suspects) == (VerdictKind.NUMERICS, ())
        assert "outside compute_loss" in verdict.reason
    for bad in nodes:
        own = [replay for replay in finite if replay.producer == bad]
        assert bad in judged([bad], own).suspects, "a single faulty device is still named"
    assert judged(list(nodes)[1:], finite).suspects, "one healthy rank: not the program alone"
    assert judged(list(nodes), finite[len(others[Rank(0)]) :]).suspects, "a rank that nobody replayed"
    shown = nonfinite(0, dict.fromkeys(others[Rank(0)], True)) + [replay for replay in finite if replay.producer]
    assert judged(list(nodes), shown).rule != "nonfinite_outside_the_replay"


def test_every_rank_on_a_single_node_is_still_open() -> None:
    nodes = placed(4, per_node=4)
    verdict = judge_nonfinite(nodes=nodes, local=list(nodes), reduced=list(nodes))
    assert (verdict.kind, verdict.suspects) == (VerdictKind.AMBIGUOUS, tuple(nodes))


def test_a_nonfinite_gradient_from_a_batch_that_is_not_certain_accuses_nobody() -> None:
    verdict = judge_nonfinite(
        nodes=placed(4),
        local=[Rank(1)],
        reduced=[Rank(1)],
        replays=nonfinite(1, {2: False, 3: False}),
        unknown_inputs={Rank(1): "its batch was written to"},
    )
    assert (verdict.kind, verdict.suspects) == (VerdictKind.INPUTS, ())
    assert "its batch was written to" in verdict.reason


def test_finite_everywhere_and_a_nonfinite_sum_accuses_nobody() -> None:
    nodes = placed(3)
    alike = judge_nonfinite(nodes=nodes, local=[], reduced=list(nodes))
    assert (alike.kind, alike.suspects) == (VerdictKind.NUMERICS, ())
    some = judge_nonfinite(nodes=nodes, local=[], reduced=[Rank(1)])
    assert (some.kind, some.suspects) == (VerdictKind.AMBIGUOUS, ())


def test_uneven_nodes_are_refused_with_advice() -> None:
    with pytest.raises(TopologyError, match="same number of processes"):
        Ring({Rank(0): NodeName("a"), Rank(1): NodeName("a"), Rank(2): NodeName("b")})
