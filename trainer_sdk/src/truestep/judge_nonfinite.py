"""Verdicts on non-finite gradients. Pure, like the judge of audits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from truestep.contract import NodeName, Rank, Verdict, VerdictKind
from truestep.judge_words import ARBITRATION_NODES, place_text, ranks_text, third_node_hint


@dataclass(frozen=True, kw_only=True)
class NonfiniteReplay:
    """Whether the micro-batch of `producer` gave a non-finite gradient on `replayer` too."""

    producer: Rank
    replayer: Rank
    nonfinite: bool = False
    failed: str = ""


def judge_nonfinite(
    *,
    nodes: Mapping[Rank, NodeName],
    local: Iterable[Rank],
    reduced: Iterable[Rank],
    replays: Sequence[NonfiniteReplay] = (),
    unknown_inputs: Mapping[Rank, str] | None = None,
    partly: Collection[Rank] = (),
) -> Verdict:
    """The verdict on a non-finite gradient.

    local: ranks whose own gradient was non-finite; reduced: ranks whose averaged gradient was; replays: each local
    one's micro-batch, on other nodes; unknown_inputs: local ones whose batch is not certain, and why; partly: ranks
    of which one micro-batch of several was replayed, so that a finite one says nothing of the others. Rules in order:
    nobody's local gradient (reduction); a batch that is not certain (inputs); reproducible everywhere (numerics); on
    every rank and in nobody's replay (numerics); not reproducible on at least two other nodes, on one node only
    (conclusive); anything else (ambiguous). A rank whose micro-batch raised in a replay is not accused: what was
    replayed was then not what it ran.
    """
    accused = sorted(set(local))
    if not accused:
        return _judge_reduction_overflow(nodes, sorted(set(reduced)))
    if unknown_inputs:
        rank, why = min(unknown_inputs.items())
        return Verdict(
            kind=VerdictKind.INPUTS,
            rule="inputs",
            reason=f"the gradient of {ranks_text(accused)} is non-finite, and it cannot be told from what rank {rank} "
            f"started; nobody is accused. {why}"[:600],
        )
    outcomes = {rank: _reproduction(rank, nodes, replays, partly) for rank in accused}
    if all(outcome == "reproduced" for outcome in outcomes.values()):
        return Verdict(
            kind=VerdictKind.NUMERICS,
            rule="reproducible",
            reason=f"the gradient of {ranks_text(accused)} is non-finite on other nodes too: look at data, learning "
            f"rate and code, "
            "or at corruption that spread before this step; nobody is accused",
        )
    if _on_every_rank_outside_the_replays(accused, nodes, replays):
        # One device cannot have spoilt what the others computed alone: the program did, where no replay goes.
        several = " (one micro-batch of several was replayed)" if set(partly) & set(accused) else ""
        return Verdict(
            kind=VerdictKind.NUMERICS,
            rule="nonfinite_outside_the_replay",
            reason="the gradient of every rank is non-finite at the same step, and no replay of compute_loss on "
            f"another node is{several}: no single GPU can be to blame, and nobody is accused. The recorded pass is not "
            "what compute_loss computes: look for a term added to the loss, a scale or a gradient changed outside "
            "compute_loss, and move it into compute_loss",
        )
    convicted = tuple(rank for rank in accused if outcomes[rank] == "finite elsewhere")
    witnesses = _replayers(replays, accused)
    if len(convicted) == len(accused) and len({nodes[rank] for rank in convicted}) == 1:
        return Verdict(
            kind=VerdictKind.CONCLUSIVE,
            rule="nonfinite_not_reproduced",
            suspects=convicted,
            witnesses=witnesses,
            reason=f"{place_text(convicted, nodes)} produced a non-finite gradient that {ranks_text(witnesses)} do not "
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
        reason=f"the non-finite gradient of {ranks_text(accused)} was not settled by replays on two other nodes{why}",
        settle=third_node_hint(nodes),
    )


def judge_sharded_nonfinite(step: int) -> Verdict:
    """A gradient of a sharded model is NaN or Inf. It was summed before anyone saw it, so nobody is named."""
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="nonfinite_sharded",
        reason=f"a reduced gradient of step {step} is NaN or infinite; with sharded parameters no rank's own gradient "
        "is kept, so it cannot be told who had it first; the update was dropped",
        settle="go back to the last checkpoint and run the step again: a NaN that returns is of data, learning rate or "
        "code; one that does not is of a device, and a stress test of every node is the next step",
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
        reason=f"every rank's own gradient is finite, but {ranks_text(reduced)} received a non-finite average and "
        f"the others did not",
        settle="run an all-reduce correctness test on pairs of these nodes",
    )


def _reproduction(
    rank: Rank, nodes: Mapping[Rank, NodeName], replays: Sequence[NonfiniteReplay], partly: Collection[Rank]
) -> str:
    """'reproduced', 'finite elsewhere', 'raised' or 'open', from replays on other nodes than the producer's."""
    others = [r for r in replays if r.producer == rank and nodes[r.replayer] != nodes[rank]]
    if any(replay.failed for replay in others):
        return "raised"
    if rank in partly and not all(replay.nonfinite for replay in others):
        return "open"
    if others and all(replay.nonfinite for replay in others):
        return "reproduced"
    if len({nodes[r.replayer] for r in others}) >= ARBITRATION_NODES - 1 and not any(r.nonfinite for r in others):
        return "finite elsewhere"
    return "open"


def _on_every_rank_outside_the_replays(
    accused: Sequence[Rank], nodes: Mapping[Rank, NodeName], replays: Sequence[NonfiniteReplay]
) -> bool:
    """Whether all ranks, of two nodes at least, are accused, and each was replayed elsewhere with a finite result."""
    if len(accused) < len(nodes) or len(set(nodes.values())) < 2:
        return False
    elsewhere = {r.producer for r in replays if nodes[r.replayer] != nodes[r.producer]}
    return elsewhere >= set(accused) and not any(r.nonfinite or r.failed for r in replays)


def _replayers(replays: Sequence[NonfiniteReplay], accused: Sequence[Rank]) -> tuple[Rank, ...]:
    return tuple(sorted({r.replayer for r in replays if r.producer in accused and not r.failed} - set(accused)))
