"""A loss or a model that asks for its rank is no fault of that rank's hardware: it is audited, or refused."""

from __future__ import annotations

import pytest

from tests.distributed import rank_runs
from tests.distributed.conftest import RunRanks, same_everywhere

pytestmark = pytest.mark.distributed


def test_passes_that_ask_for_their_rank_are_audited_or_refused_and_accuse_nobody(run_ranks: RunRanks) -> None:
    results = run_ranks(rank_runs.rank_dependence, 3)

    def case(name: str, key: str) -> object:
        return same_everywhere([row[name] for row in results], key)

    audited = ("a loss that weighs rank 0", "a group of all", "recomputed", "recomputed, reentrant")
    for name in (*audited, "compiled, asks nothing"):
        assert (case(name, "end"), case(name, "audited")) == ("trained", 5), name
        assert case(name, "suspected") == [], name
    assert case("NaN on rank 0", "end") == "nonfinite at 0: numerics []"
    assert "refused: no rank could replay" in str(case("a group of some", "end"))
    assert "in a group that not every rank is in" in str(case("a group of some", "end"))
    assert "where it becomes a constant" in str(case("compiled", "end"))
    for rank, row in enumerate(results):
        assert {run["rank"] for run in row.values()} == {rank}
