"""Which of an audit's computations goes into the bundle, and who writes it. Pure: the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from truestep.contract import Rank, Verdict, VerdictKind
from truestep.judge import AuditEvidence, Replayed
from truestep.replay import PassResult


@dataclass(frozen=True, kw_only=True)
class ChosenPass:
    """One mismatching edge and its parties."""

    producer: Rank
    replayer: Rank
    parties: tuple[Rank, ...]
    """Ranks that have a result of the producer's micro-batch, sorted."""
    reference: Rank | None
    """A party whose result a majority of them shares; None where there is no majority."""
    writer: Rank
    """Holds the inputs; a witness where there is one."""


@dataclass(frozen=True, kw_only=True)
class FailingPass:
    """The chosen computation, as this rank holds it."""

    chosen: ChosenPass
    compares_loss: bool
    compares_gradients: bool
    modes: Mapping[str, Any] = field(default_factory=dict)
    """Kernel modes of the audit."""
    own: PassResult | None = None
    """What this rank computed; None where it is no party."""
    payload: bytes = b""
    """The inputs, as `PassInputs.to_bytes` gives them; empty where this rank does not have them."""


def choose_pass(evidence: AuditEvidence, edges: Sequence[Replayed], verdict: Verdict) -> ChosenPass | None:
    """The computation that says most: one that third nodes settled, and best one that a suspect recorded.

    None where no edge mismatches, or where the parties did not start from the same inputs.
    """
    if not edges or verdict.kind is VerdictKind.INPUTS:
        return None

    def rank_of(edge: Replayed) -> tuple[bool, bool, Rank]:
        return _majority(_results(edge, evidence)) is None, edge.producer not in verdict.suspects, edge.producer

    edge = min(edges, key=rank_of)
    results = _results(edge, evidence)
    right = _majority(results)
    sharing = sorted(rank for rank, result in results.items() if result == right)
    innocent = [rank for rank in sharing or sorted(results) if rank not in verdict.suspects]
    return ChosenPass(
        producer=edge.producer,
        replayer=edge.replayer,
        parties=tuple(sorted(results)),
        reference=(innocent or sharing)[0] if sharing else None,
        writer=innocent[0] if innocent else edge.replayer,
    )


def choose_agreed_pass(verdict: Verdict, results: Mapping[Rank, Mapping[Rank, str]]) -> ChosenPass | None:
    """The convicted rank's computation, of which other ranks have a result and the convicted one has none.

    results: producer -> replayer -> digest of what it computed. None where nobody is convicted, or the replayers do not
    agree bit for bit (kernels that do not repeat): a healthy device would then seem to differ too.
    """
    if verdict.kind is not VerdictKind.CONCLUSIVE:
        return None
    for producer in verdict.suspects:
        mine = results.get(producer, {})
        parties = tuple(sorted(rank for rank in mine if rank not in verdict.suspects))
        if len(parties) >= 2 and len({mine[rank] for rank in parties}) == 1:
            first = parties[0]
            return ChosenPass(producer=producer, replayer=first, parties=parties, reference=first, writer=first)
    return None


def _results(edge: Replayed, evidence: AuditEvidence) -> dict[Rank, str]:
    arbiters = {
        attempt.replayer: attempt.result
        for attempt in evidence.arbitration
        if attempt.producer == edge.producer
        and not attempt.failed
        and attempt.inputs == evidence.recorded[edge.producer].inputs
    }
    return {**arbiters, edge.producer: evidence.recorded[edge.producer].result, edge.replayer: edge.result}


def _majority(results: Mapping[Rank, str]) -> str | None:
    value, count = Counter(results.values()).most_common(1)[0]
    return value if count >= 2 and 2 * count > len(results) else None
