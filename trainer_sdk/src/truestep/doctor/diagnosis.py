"""What an examination found, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from truestep.contract import NodeName, Rank


class Level(StrEnum):
    """How bad an observation is, from harmless to worst."""

    FINE = "fine"
    NOTE = "note"
    """Works, with a limit that should be known."""
    SUSPECT = "suspect"
    """One node alone computes something else: perhaps its hardware. Training may start; the audits judge it."""
    LOSS_ONLY = "loss only"
    """Audits compare losses only: the backward is not covered, and no checkpoint becomes trusted."""
    REFUSED = "refused"
    """Audits cannot work like this."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One thing that was examined."""

    subject: str
    """``environment``, ``modules``, ``compilation``, ``loss``, ``kernels``, ``rebuild_batch`` or ``nodes``."""
    level: Level
    message: str
    """What was found and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All observations; the same on every rank."""

    observations: tuple[Observation, ...]

    @property
    def loses_gradients(self) -> bool:
        """Whether audits must leave gradients out."""
        return bool(self.at(Level.LOSS_ONLY))

    @property
    def coverage(self) -> str:
        """What audits of this run compare, in the words that an alarm's evidence carries."""
        return "loss only: backward not covered" if self.loses_gradients else "loss and gradients"

    def at(self, level: Level) -> tuple[Observation, ...]:
        """The observations of one level."""
        return tuple(observation for observation in self.observations if observation.level is level)


class Steadiness(StrEnum):
    """What repeated runs of one pass on every rank show."""

    EQUAL = "equal"
    ONE_NODE = "one node"
    """A single node differs from a majority, or from itself while the others repeat."""
    UNREPEATABLE = "unrepeatable"
    """Several nodes, or one of two, do not repeat themselves."""
    UNEQUAL = "unequal"
    """Every rank repeats itself, and nodes differ from one another without a clear outlier."""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """A conclusion over all ranks, and the ranks that it is about."""

    steadiness: Steadiness
    ranks: tuple[Rank, ...] = ()
    reference: Rank
    """A rank whose result most nodes share."""


def judge_repeats(runs: Sequence[Sequence[str]], nodes: Mapping[Rank, NodeName]) -> Repeats:
    """runs: for each rank, what it got from the same inputs, run after run."""
    unsteady = tuple(Rank(rank) for rank, results in enumerate(runs) if len(set(results)) > 1)
    steady = {Rank(rank): results[0] for rank, results in enumerate(runs) if len(set(results)) == 1}
    votes: dict[str, set[NodeName]] = {}
    for rank, value in steady.items():
        votes.setdefault(value, set()).add(nodes[rank])
    favourite = max(votes, key=lambda value: len(votes[value])) if votes else None
    reference = next((rank for rank, value in steady.items() if value == favourite), Rank(0))
    odd = unsteady + tuple(rank for rank, value in steady.items() if value != favourite)
    if not odd:
        return Repeats(steadiness=Steadiness.EQUAL, reference=reference)
    majority = favourite is not None and 2 * len(votes[favourite]) > len(set(nodes.values()))
    if majority and len({nodes[rank] for rank in odd}) == 1 and len(set(nodes.values())) > 2:
        return Repeats(steadiness=Steadiness.ONE_NODE, ranks=odd, reference=reference)
    if unsteady:
        return Repeats(steadiness=Steadiness.UNREPEATABLE, ranks=unsteady, reference=reference)
    return Repeats(steadiness=Steadiness.UNEQUAL, ranks=odd, reference=reference)
