"""Evidence -> verdict. Pure: no torch, no communication, no clock. Every rank judges the same evidence and concludes
the same.

`judge_audit`, rules in order of precedence; the first that applies decides:

1. **inputs**: a replay started from another batch, RNG state or buffers than were recorded. Nobody is accused.
2. **clean**: no replay contradicts its record. No verdict.
3. **nondeterministic**: some edge on which no two results agree, and every party's second run differs from its own
first.
   A software verdict; nobody is accused.
4. **unsettled**: an edge (producer, replayer) that no third node settled: no third node, an arbiter failed, arbiters
   contradict one another, or no two results agree. Ambiguous; the suspects are that edge's parties and every outlier
   found.
5. **several nodes**: settled edges name outliers on different nodes. Ambiguous.
6. **arbitrated**: all edges are settled and name ranks of one node. Conclusive. Several ranks of it: the node.

That two mismatching edges meet in one rank is never enough: with faults in ranks 0 and 2 of 4, all four edges mismatch
and the meeting points are also the healthy 1 and 3. A second run that comes out right clears nobody: a real faulty GPU
failed twice in 10^9 replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from truestep.contract import NodeName, Rank, Verdict, VerdictKind

ARBITRATION_NODES = 3


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a rank computed in the audited step itself."""

    rank: Rank
    node: NodeName
    inputs: str
    """Fingerprint of batch, RNG state and buffers before the forward."""
    result: str
    """Fingerprint of the loss and of every local gradient."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a rank computed for the micro-batch of `producer`."""

    producer: Rank
    replayer: Rank
    inputs: str = ""
    result: str = ""
    failed: str = ""
    """Why the replay raised; `inputs` and `result` are then meaningless."""


@dataclass(frozen=True, kw_only=True)
class AuditEvidence:
    """All of an audit, the same on every rank."""

    recorded: Mapping[Rank, Recorded]
    ring: Sequence[Replayed]
    """One per rank: the audit proper."""
    arbitration: Sequence[Replayed] = ()
    """Replays of mismatching edges' micro-batches by nodes that are not on the edge."""
    reruns: Sequence[Replayed] = ()
    """Second runs, of those who replayed or recorded a mismatching edge's micro-batch, on the same device."""


@dataclass(frozen=True, kw_only=True)
class NonfiniteReplay:
    """Whether the micro-batch of `producer` gave a non-finite gradient on `replayer` too."""

    producer: Rank
    replayer: Rank
    nonfinite: bool = False
    failed: str = ""


@dataclass(frozen=True)
class _Settlement:
    """What the third nodes said about one edge."""

    edge: Replayed
    outlier: Rank | None
    witnesses: tuple[Rank, ...]
    no_two_agree: bool


def mismatching_edges(recorded: Mapping[Rank, Recorded], ring: Iterable[Replayed]) -> tuple[Replayed, ...]:
    """Replays that started from the recorded inputs and gave another result, in order of the producer."""
    return tuple(
        sorted(
            (
                replay
                for replay in ring
                if not replay.failed
                and replay.inputs == recorded[replay.producer].inputs
                and replay.result != recorded[replay.producer].result
            ),
            key=lambda replay: replay.producer,
        )
    )


def judge_audit(evidence: AuditEvidence, *, subject: str = "gradients") -> Verdict | None:
    """The verdict of a ring replay audit, or None where nothing contradicts the record. Rules in the module's
    docstring.

    subject: what was computed twice, for the reason's sentence.
    """
    recorded = evidence.recorded
    for replay in (*evidence.ring, *evidence.arbitration, *evidence.reruns):
        if not replay.failed and replay.inputs != recorded[replay.producer].inputs:
            return Verdict(
                kind=VerdictKind.INPUTS,
                rule="inputs",
                reason=f"rank {replay.replayer} could not start from what rank {replay.producer} started from "
                f"(batch, RNG "
                "state or buffers differ); nobody is accused: check that rebuild_batch gives the same batch for "
                "the same step and rank",
            )
    edges = mismatching_edges(recorded, evidence.ring)
    if not edges:
        return None
    settlements = [_settle(edge, evidence) for edge in edges]
    for settlement in settlements:
        if settlement.no_two_agree and _all_reruns_differ(settlement.edge, evidence):
            return Verdict(
                kind=VerdictKind.NONDETERMINISTIC,
                rule="nondeterministic",
                reason=f"no two runs of rank {settlement.edge.producer}'s micro-batch agree, and no device "
                f"repeats its own result: "
                "a kernel is not deterministic; nobody is accused",
            )
    return _conclude(settlements, recorded, subject)


def judge_nonfinite(
    *,
    nodes: Mapping[Rank, NodeName],
    local: Iterable[Rank],
    reduced: Iterable[Rank],
    replays: Sequence[NonfiniteReplay] = (),
    unknown_inputs: Mapping[Rank, str] | None = None,
) -> Verdict:
    """The verdict on a non-finite gradient.

    local: ranks whose own gradient was non-finite; reduced: ranks whose averaged gradient was; replays: each local
    one's micro-batch, on other nodes; unknown_inputs: local ones whose batch is not certain, and why. Rules in order:
    nobody's local gradient (reduction); a batch that is not certain (inputs); reproducible everywhere (numerics); not
    reproducible on at least two other nodes, on one node only (conclusive); anything else (ambiguous). A rank whose
    micro-batch raised in a replay is not accused: what was replayed was then not what it ran.
    """
    accused = sorted(set(local))
    if not accused:
        return _judge_reduction_overflow(nodes, sorted(set(reduced)))
    if unknown_inputs:
        rank, why = min(unknown_inputs.items())
        return Verdict(
            kind=VerdictKind.INPUTS,
            rule="inputs",
            reason=f"the gradient of {_ranks(accused)} is non-finite, and it cannot be told from what rank {rank} "
            f"started; nobody is accused. {why}"[:600],
        )
    outcomes = {rank: _reproduction(rank, nodes, replays) for rank in accused}
    if all(outcome == "reproduced" for outcome in outcomes.values()):
        return Verdict(
            kind=VerdictKind.NUMERICS,
            rule="reproducible",
            reason=f"the gradient of {_ranks(accused)} is non-finite on other nodes too: look at data, learning "
            f"rate and code, "
            "or at corruption that spread before this step; nobody is accused",
        )
    convicted = tuple(rank for rank in accused if outcomes[rank] == "finite elsewhere")
    witnesses = _replayers(replays, accused)
    if len(convicted) == len(accused) and len({nodes[rank] for rank in convicted}) == 1:
        return Verdict(
            kind=VerdictKind.CONCLUSIVE,
            rule="nonfinite_not_reproduced",
            suspects=convicted,
            witnesses=witnesses,
            reason=f"{_place(convicted, nodes)} produced a non-finite gradient that {_ranks(witnesses)} do not "
            f"reproduce from the same inputs",
        )
    suspects = tuple(rank for rank in accused if outcomes[rank] not in ("reproduced", "raised"))
    raised = [replay for replay in replays if replay.failed]
    why = f"; a replay raised {raised[0].failed[:200]}" if raised else ""
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="nonfinite_unsettled",
        suspects=suspects,
        witnesses=tuple(rank for rank in witnesses if rank not in suspects),
        reason=f"the non-finite gradient of {_ranks(accused)} was not settled by replays on two other nodes{why}",
        settle=_third_node_hint(nodes),
    )


def judge_copies(words: Mapping[Rank, str], nodes: Mapping[Rank, NodeName], *, subject: str) -> Verdict | None:
    """Name the copies that differ from a strict majority of nodes; None where all agree.

    words: each rank's fingerprint of `subject` ("weights", "optimizer state"). A node votes with the word that a strict
    majority of its own ranks holds, and abstains without one; abstentions count in the total. Only sound while the
    reduced
    gradients agreed on every step since the last comparison: else a ring that corrupts on receipt makes the only right
    copy the minority. The guard checks that on every step, before the update.
    """
    if len(set(words.values())) <= 1:
        return None
    votes = {node: _majority([words[rank] for rank in words if nodes[rank] == node]) for node in set(nodes.values())}
    favourite, count = (
        Counter(vote for vote in votes.values() if vote is not None).most_common(1)[0]
        if any(votes.values())
        else ("", 0)
    )
    differing = tuple(sorted(rank for rank, value in words.items() if value != favourite))
    agreeing = tuple(sorted(rank for rank, value in words.items() if value == favourite))
    if 2 * count <= len(votes):
        return Verdict(
            kind=VerdictKind.AMBIGUOUS,
            rule="no_majority",
            suspects=tuple(sorted(words)),
            reason=f"the {subject} differ between ranks and no value is held by a strict majority of the "
            f"{len(votes)} node(s)",
            settle=_third_node_hint(nodes),
        )
    conclusive = len(votes) >= ARBITRATION_NODES
    return Verdict(
        kind=VerdictKind.CONCLUSIVE if conclusive else VerdictKind.AMBIGUOUS,
        rule="majority_of_nodes" if conclusive else "majority_of_few_nodes",
        suspects=differing,
        witnesses=agreeing,
        reason=f"the {subject} of {_place(differing, nodes)} differ from those that {count} of {len(votes)} "
        f"node(s) hold",
        settle="" if conclusive else _third_node_hint(nodes),
    )


def judge_unequal_reduction(step: int) -> Verdict:
    """The averaged gradients differ between ranks. A sum names nobody: its error can enter anywhere on the way."""
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="reduction_unequal",
        reason=f"the ranks received different averaged gradients in step {step}: the reduction or the fabric "
        f"corrupts data; the update was dropped",
        settle="run an all-reduce correctness test on pairs of these nodes",
    )


def judge_wrong_sum(step: int, elements: int) -> Verdict:
    """All ranks received the same averaged gradient, and it is not the average of theirs. Names nobody, as above."""
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="reduction_wrong_sum",
        reason=f"the averaged gradient of step {step} is the same on every rank and not the average of what the ranks "
        f"contributed, in at least {elements} element(s): the reduction or the fabric corrupts data; the update was "
        f"dropped",
        settle="run an all-reduce correctness test on pairs of these nodes",
    )


def judge_unequal_scales(step: int) -> Verdict:
    """The ranks' GradScaler factors differ: replicas would diverge from here. Nobody is named."""
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="scales_unequal",
        reason=f"the ranks' GradScaler factors differ in step {step}, so their updates would diverge; the "
        f"update was dropped",
        settle="look for a skipped step on some ranks only, in code of your own between the backward and scaler.step",
    )


def _settle(edge: Replayed, evidence: AuditEvidence) -> _Settlement:
    recorded = evidence.recorded
    record = recorded[edge.producer].result
    parties = {recorded[edge.producer].node, recorded[edge.replayer].node}
    asked = [
        r for r in evidence.arbitration if r.producer == edge.producer and recorded[r.replayer].node not in parties
    ]
    opinions = {arbiter.result for arbiter in asked if not arbiter.failed}
    complete = bool(asked) and not any(arbiter.failed for arbiter in asked)
    arbiters = tuple(sorted(arbiter.replayer for arbiter in asked))
    if complete and opinions == {record}:
        return _Settlement(edge, edge.replayer, (edge.producer, *arbiters), no_two_agree=False)
    if complete and opinions == {edge.result}:
        return _Settlement(edge, edge.producer, (edge.replayer, *arbiters), no_two_agree=False)
    results = [record, edge.result, *(arbiter.result for arbiter in asked if not arbiter.failed)]
    return _Settlement(edge, None, (), no_two_agree=complete and len(set(results)) == len(results))


def _all_reruns_differ(edge: Replayed, evidence: AuditEvidence) -> bool:
    first = {edge.producer: evidence.recorded[edge.producer].result, edge.replayer: edge.result}
    first |= {r.replayer: r.result for r in evidence.arbitration if r.producer == edge.producer}
    again = {r.replayer: r.result for r in evidence.reruns if r.producer == edge.producer and not r.failed}
    return all(rank in again and again[rank] != result for rank, result in first.items())


def _conclude(settlements: Sequence[_Settlement], recorded: Mapping[Rank, Recorded], subject: str) -> Verdict:
    nodes = {rank: record.node for rank, record in recorded.items()}
    outliers = {s.outlier for s in settlements if s.outlier is not None}
    unsettled = [s.edge for s in settlements if s.outlier is None]
    suspects = set(outliers)
    for edge in unsettled:
        suspects |= {edge.producer, edge.replayer}
    witnesses = tuple(sorted({rank for s in settlements for rank in s.witnesses} - suspects))
    named = tuple(sorted(suspects))
    if unsettled:
        return Verdict(
            kind=VerdictKind.AMBIGUOUS,
            rule="unsettled",
            suspects=named,
            witnesses=witnesses,
            reason=f"a replay contradicts its record, and no third node settled which of {_ranks(named)} "
            f"computed wrongly",
            settle=_third_node_hint(nodes),
        )
    if len({nodes[rank] for rank in outliers}) > 1:
        return Verdict(
            kind=VerdictKind.AMBIGUOUS,
            rule="several_nodes",
            suspects=named,
            witnesses=witnesses,
            reason=f"third nodes contradict {_ranks(named)}, which are on different nodes: more than one fault, "
            f"or one outside them",
            settle="replay the step's micro-batches on nodes that took no part",
        )
    return Verdict(
        kind=VerdictKind.CONCLUSIVE,
        rule="arbitrated" if len(named) == 1 else "arbitrated_node",
        suspects=named,
        witnesses=witnesses,
        reason=f"{_place(named, nodes)} computed other {subject} than {_ranks(witnesses)} from the same inputs",
    )


def _judge_reduction_overflow(nodes: Mapping[Rank, NodeName], reduced: Sequence[Rank]) -> Verdict:
    if len(reduced) == len(nodes):
        return Verdict(
            kind=VerdictKind.NUMERICS,
            rule="reduction_overflow",
            reason="every rank's own gradient is finite and their average is not, on all ranks alike: the sum "
            "overflows its "
            "data type; lower the learning rate or the loss scale, or reduce in float32. Nobody is accused",
        )
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="reduction_unequal",
        reason=f"every rank's own gradient is finite, but {_ranks(reduced)} received a non-finite average and "
        f"the others did not",
        settle="run an all-reduce correctness test on pairs of these nodes",
    )


def _reproduction(rank: Rank, nodes: Mapping[Rank, NodeName], replays: Sequence[NonfiniteReplay]) -> str:
    """'reproduced', 'finite elsewhere', 'raised' or 'open', from replays on other nodes than the producer's."""
    others = [r for r in replays if r.producer == rank and nodes[r.replayer] != nodes[rank]]
    if any(replay.failed for replay in others):
        return "raised"
    if others and all(replay.nonfinite for replay in others):
        return "reproduced"
    if len({nodes[r.replayer] for r in others}) >= ARBITRATION_NODES - 1 and not any(r.nonfinite for r in others):
        return "finite elsewhere"
    return "open"


def _replayers(replays: Sequence[NonfiniteReplay], accused: Sequence[Rank]) -> tuple[Rank, ...]:
    return tuple(sorted({r.replayer for r in replays if r.producer in accused and not r.failed} - set(accused)))


def _majority(values: Sequence[str]) -> str | None:
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None


def _third_node_hint(nodes: Mapping[Rank, NodeName]) -> str:
    if len(set(nodes.values())) < ARBITRATION_NODES:
        return f"run on at least {ARBITRATION_NODES} nodes: a third one settles which of two is wrong"
    return "replay the step's micro-batches on nodes that took no part"


def _place(ranks: Sequence[Rank], nodes: Mapping[Rank, NodeName]) -> str:
    named = sorted({nodes[rank] for rank in ranks})
    if len(named) == 1 and len(ranks) > 1:
        return f"node {named[0]} ({_ranks(ranks)})"
    return f"{_ranks(ranks)} on {', '.join(named[:4])}{' and others' if len(named) > 4 else ''}"


def _ranks(ranks: Sequence[Rank]) -> str:
    if not ranks:
        return "no rank"
    shown = ", ".join(map(str, ranks[:8]))
    more = "" if len(ranks) <= 8 else f" and {len(ranks) - 8} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
