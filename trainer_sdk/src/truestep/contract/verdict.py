"""What a check concluded: where a number was wrong, and why as far as one event can tell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from truestep.contract.types import Rank


class VerdictKind(StrEnum):
    """*Where* a number was wrong."""

    CONCLUSIVE = "conclusive"
    """Located: the suspects computed a value that a majority of independent copies or replays contradicts."""
    AMBIGUOUS = "ambiguous"
    """A fault happened, but the evidence does not single out one party; the suspects are the candidates."""
    INPUTS = "inputs"
    """The parties did not start from the same batch, RNG, buffers or compiled code. Nobody is accused."""
    NUMERICS = "numerics"
    """The same non-finite value everywhere: reproducible, cause open. Nobody is accused."""
    NONDETERMINISTIC = "nondeterministic"
    """Reruns on one device differ as well: a software verdict. Nobody is accused."""


class VerdictCause(StrEnum):
    """*Why*. One event cannot tell a rare software race from a bad GPU, so a single alarm is always ``open``."""

    OPEN = "open"
    HARDWARE = "hardware"
    """The same GPU was caught again while equal replays on other GPUs stayed clean."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A conclusion and the sentence that explains it."""

    kind: VerdictKind
    reason: str
    """One sentence that a tired person can act on at night."""
    suspects: tuple[Rank, ...] = ()
    """Ranks, sorted. The named ones where `kind` is conclusive, the candidates where it is ambiguous, else empty."""
    witnesses: tuple[Rank, ...] = ()
    """Ranks, sorted, whose results contradict the suspects'."""
    rule: str = ""
    """Name of the rule that decided, for tests and for people who want to look it up."""
    cause: VerdictCause = VerdictCause.OPEN
    settle: str = ""
    """For an ambiguous verdict: what would settle it."""

    def __post_init__(self) -> None:
        accusing = self.kind in (VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS)
        if self.suspects and not accusing:
            raise ValueError(f"a {self.kind} verdict accuses nobody, but suspects are {self.suspects}")
        if self.kind is VerdictKind.CONCLUSIVE and not self.suspects:
            raise ValueError("a conclusive verdict names at least one suspect")
