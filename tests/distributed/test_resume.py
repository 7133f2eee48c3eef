"""Kill and resume: the resumed run ends with the bits of the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import scenarios
from tests.distributed.conftest import RunRanks

pytestmark = pytest.mark.distributed


def test_resumed_run_ends_bit_identical_even_with_ranks_on_other_nodes(run_ranks: RunRanks, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    directory.mkdir()
    whole = run_ranks(scenarios.interrupted_run, 4, 25, None, 0, str(directory))
    run_ranks(scenarios.interrupted_run, 4, 25, 10, 0, str(directory))
    resumed = run_ranks(scenarios.interrupted_run, 4, 25, None, 10, str(directory), nodes=["d", "a", "spare", "b"])

    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][10:]
        assert {**after, "losses": None} == {**before, "losses": None}

    cold = run_ranks(scenarios.interrupted_run, 4, 25, None, 10, str(directory), warm_up=False)
    assert [row["weights"] for row in cold] != [row["weights"] for row in whole], "then the warm-up pass is not needed"
