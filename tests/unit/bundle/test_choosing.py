"""Of a convicted rank's non-finite computation a bundle is made only where others agree on the right result."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from truestep.bundle.failing import choose_agreed_pass
from truestep.contract import Rank, Verdict, VerdictKind

CONVICTED = Verdict(kind=VerdictKind.CONCLUSIVE, suspects=(Rank(1),), reason="r")
Results = Mapping[Rank, Mapping[Rank, str]]


def results(**by_replayer: str) -> Results:
    """What `r0`, `r2`, ... computed for rank 1."""
    return {Rank(1): {Rank(int(name[1:])): value for name, value in by_replayer.items()}}


def test_a_witness_writes_what_all_witnesses_computed() -> None:
    chosen = choose_agreed_pass(CONVICTED, results(r3="same", r2="same"))
    assert chosen is not None
    assert (chosen.producer, chosen.parties) == (1, (2, 3))
    assert chosen.writer == chosen.reference == chosen.replayer == 2


@pytest.mark.parametrize(
    ("verdict", "computed"),
    [
        (CONVICTED, results(r2="one", r3="other")),
        (CONVICTED, results(r2="alone")),
        (CONVICTED, results(r1="its own", r2="its own")),
        (CONVICTED, {}),
        (Verdict(kind=VerdictKind.AMBIGUOUS, suspects=(Rank(1),), reason="r"), results(r2="same", r3="same")),
        (Verdict(kind=VerdictKind.NUMERICS, reason="r"), results(r2="same", r3="same")),
    ],
    ids=["they disagree", "one witness", "a suspect is no witness", "nobody ran it", "not settled", "reproduced"],
)
def test_otherwise_there_is_nothing_to_compare_a_repetition_with(verdict: Verdict, computed: Results) -> None:
    assert choose_agreed_pass(verdict, computed) is None
