"""Whom a difference accuses in what PyTorch does not keep equal: every pattern of signs on three ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from truestep.checks.held_alike import not_accusing


def row(fingerprint: str = "same", *, known: bool = True, written: bool = False, kept_equal: bool = False) -> Any:
    return {"buffer": {"fingerprint": fingerprint, "known": known, "written": written, "kept_equal": kept_equal}}


def test_a_difference_without_a_sign_of_a_write_accuses() -> None:
    assert not_accusing([row(), row("other"), row()]) == {}


@pytest.mark.parametrize("signs", list(itertools.product([False, True], repeat=6)))
def test_a_write_excuses_unless_every_rank_writes_and_kept_it_equal_before(signs: tuple[bool, ...]) -> None:
    written, kept = signs[:3], signs[3:]
    rows = [
        row("other" if rank == 1 else "same", written=w, kept_equal=k)
        for rank, (w, k) in enumerate(zip(written, kept, strict=True))
    ]
    accuses = not any(written) or (all(written) and all(kept))
    assert (not_accusing(rows) == {}) is accuses


def test_the_reason_names_the_writers_and_who_lacks_it() -> None:
    assert (
        "program of rank 0, 2 has written"
        in not_accusing([row(written=True), row("other"), row(written=True)])["buffer"]
    )
    assert not_accusing([row(), {}, row()]) == {"buffer": "rank 1 does not have it"}
    assert "never been equal" in not_accusing([row(known=False), row("other"), row()])["buffer"]


def test_what_is_equal_needs_no_excuse() -> None:
    assert not_accusing([row(written=True), row(known=False), row()]) == {}
