"""Evidence -> verdict. Pure: no torch, no communication, no clock. Every rank judges the same evidence and concludes
the same.

`judge_audit`, rules in order of precedence; the first that applies decides:

1. **inputs**: replays that started from another batch, RNG state or buffers than were recorded say nothing of the
   result, and are left out. Where they have no rank in common, or nothing else contradicts a record, that is the
   verdict. Nobody is accused.
2. **clean**: no replay contradicts its record. No verdict.
3. **nondeterministic**: some edge on which every party's second run differs from its own first. One faulty node does
   not do that to the others. A software verdict; nobody is accused.
4. **replay_differs**: every edge mismatches, and on each of them everybody else, and the producer itself in its second
   run, agree with one another and contradict the record. The replayed pass is not the recorded one (a hook on a
   parameter, a counter in Python). A software verdict; nobody is accused. Faulty nodes do not look like that: a healthy
   rank's second run agrees with its record, and a faulty one's agreement with everybody else would have to come at the
   same time on all ranks.
5. **unsettled**: an edge (producer, replayer) that no third node settled: no third node, an arbiter failed, arbiters
   contradict one another, or no two results agree. Ambiguous; the suspects are that edge's parties, every outlier
   found, and the rank that replays from other inputs have in common.
6. **several nodes**: settled edges name outliers on different nodes. Ambiguous.
7. **arbitrated**: all edges are settled and name ranks of one node. Conclusive. Several ranks of it: the node.

That two mismatching edges meet in one rank is never enough: with faults in ranks 0 and 2 of 4, all four edges mismatch
and the meeting points are also the healthy 1 and 3. A second run that comes out right clears nobody: a real faulty GPU
failed twice in 10^9 replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from truestep.contract import NodeName, Rank, Verdict, VerdictKind
from truestep.contract.words import counted
from truestep.judge_words import ARBITRATION_NODES, place_text, ranks_text, third_node_hint


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
    other_inputs: str = ""
    """Why `inputs` is another fingerprint than the recorded one, where that is known."""
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


@dataclass(frozen=True)
class _Settlement:
    """What the third nodes said about one edge."""

    edge: Replayed
    outlier: Rank | None
    witnesses: tuple[Rank, ...]


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
    odd = _of_other_inputs(evidence)
    rest = _comparable(evidence)
    edges = mismatching_edges(rest.recorded, rest.ring)
    common = set.intersection(*({replay.producer, replay.replayer} for replay in odd)) if odd else set()
    if odd and not (edges and common):
        return _judge_inputs(odd[0])
    if not edges:
        return None
    settlements = [_settle(edge, rest) for edge in edges]
    return _judge_software(edges, rest) or _conclude(settlements, rest.recorded, subject, common)


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
            reason=f"the copies of the {subject} differ between ranks and no value is held by a strict majority of the "
            f"{counted(len(votes), 'node')}",
            settle=third_node_hint(nodes),
        )
    conclusive = len(votes) >= ARBITRATION_NODES
    return Verdict(
        kind=VerdictKind.CONCLUSIVE if conclusive else VerdictKind.AMBIGUOUS,
        rule="majority_of_nodes" if conclusive else "majority_of_few_nodes",
        suspects=differing,
        witnesses=agreeing,
        reason=f"the copies of the {subject} on {place_text(differing, nodes)} differ from those that {count} of "
        f"{counted(len(votes), 'node')} hold",
        settle="" if conclusive else third_node_hint(nodes),
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
        f"contributed, in at least {counted(elements, 'element')}: the reduction or the fabric corrupts data; the "
        f"update was dropped",
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


def _starts_elsewhere(replay: Replayed, recorded: Mapping[Rank, Recorded]) -> bool:
    return not replay.failed and replay.inputs != recorded[replay.producer].inputs


def _of_other_inputs(evidence: AuditEvidence) -> list[Replayed]:
    ran = (*evidence.ring, *evidence.arbitration, *evidence.reruns)
    return [replay for replay in ran if _starts_elsewhere(replay, evidence.recorded)]


def _comparable(evidence: AuditEvidence) -> AuditEvidence:
    def kept(replays: Sequence[Replayed]) -> list[Replayed]:
        return [replay for replay in replays if not _starts_elsewhere(replay, evidence.recorded)]

    return replace(
        evidence, ring=kept(evidence.ring), arbitration=kept(evidence.arbitration), reruns=kept(evidence.reruns)
    )


def _judge_inputs(odd: Replayed) -> Verdict:
    what = odd.other_inputs or "its batch, RNG state or buffers arrived with another fingerprint"
    return Verdict(
        kind=VerdictKind.INPUTS,
        rule="inputs",
        reason=f"rank {odd.replayer} could not start from what rank {odd.producer} started from: {what}; nobody is "
        "accused",
        settle="make rebuild_batch give the batch trained on, for any step and rank, also on another rank; or pass "
        "None for it: the batch travels with the audit"
        if odd.other_inputs
        else "look for code that writes to the batch or to buffers while the step's checks run",
    )


def _judge_software(edges: Sequence[Replayed], evidence: AuditEvidence) -> Verdict | None:
    for edge in edges:
        if _all_reruns_differ(edge, evidence):
            return Verdict(
                kind=VerdictKind.NONDETERMINISTIC,
                rule="nondeterministic",
                reason=f"no device repeats its own result of rank {edge.producer}'s micro-batch: a kernel is not "
                "deterministic, or the loss or the model draws from a state of its own; nobody is accused",
            )
    if len(edges) == len(evidence.recorded) and all(_only_the_record_differs(edge, evidence) for edge in edges):
        return Verdict(
            kind=VerdictKind.NONDETERMINISTIC,
            rule="replay_differs",
            reason="the replays of every rank's micro-batch agree with one another, and the rank's own second run "
            "with them, but not with what was recorded: a replay does not run what training runs (a hook on a "
            "parameter, a counter in Python); nobody is accused",
        )
    return None


def _only_the_record_differs(edge: Replayed, evidence: AuditEvidence) -> bool:
    replays = [r for r in (*evidence.arbitration, *evidence.reruns) if r.producer == edge.producer]
    own = any(replay.replayer == edge.producer for replay in replays)
    return own and all(not replay.failed and replay.result == edge.result for replay in replays)


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
        return _Settlement(edge, edge.replayer, (edge.producer, *arbiters))
    if complete and opinions == {edge.result}:
        return _Settlement(edge, edge.producer, (edge.replayer, *arbiters))
    return _Settlement(edge, None, ())


def _all_reruns_differ(edge: Replayed, evidence: AuditEvidence) -> bool:
    first = {edge.producer: evidence.recorded[edge.producer].result, edge.replayer: edge.result}
    first |= {r.replayer: r.result for r in evidence.arbitration if r.producer == edge.producer}
    again = {r.replayer: r.result for r in evidence.reruns if r.producer == edge.producer and not r.failed}
    return all(rank in again and again[rank] != result for rank, result in first.items())


def _conclude(
    settlements: Sequence[_Settlement], recorded: Mapping[Rank, Recorded], subject: str, common: set[Rank]
) -> Verdict:
    nodes = {rank: record.node for rank, record in recorded.items()}
    outliers = {s.outlier for s in settlements if s.outlier is not None}
    unsettled = [s.edge for s in settlements if s.outlier is None]
    suspects = set(outliers)
    for edge in unsettled:
        suspects |= {edge.producer, edge.replayer, *common}
    witnesses = tuple(sorted({rank for s in settlements for rank in s.witnesses} - suspects))
    named = tuple(sorted(suspects))
    if unsettled:
        return Verdict(
            kind=VerdictKind.AMBIGUOUS,
            rule="unsettled",
            suspects=named,
            witnesses=witnesses,
            reason=f"a replay contradicts its record, and no third node settled which of {ranks_text(named)} "
            f"computed wrongly",
            settle=third_node_hint(nodes),
        )
    if len({nodes[rank] for rank in outliers}) > 1:
        return Verdict(
            kind=VerdictKind.AMBIGUOUS,
            rule="several_nodes",
            suspects=named,
            witnesses=witnesses,
            reason=f"third nodes contradict {ranks_text(named)}, which are on different nodes: more than one fault, "
            f"or one outside them",
            settle="replay the step's micro-batches on nodes that took no part",
        )
    return Verdict(
        kind=VerdictKind.CONCLUSIVE,
        rule="arbitrated" if len(named) == 1 else "arbitrated_node",
        suspects=named,
        witnesses=witnesses,
        reason=f"{place_text(named, nodes)} computed other {subject} than {ranks_text(witnesses)} from the same inputs",
    )


def _majority(values: Sequence[str]) -> str | None:
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None
