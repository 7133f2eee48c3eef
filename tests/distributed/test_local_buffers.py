"""Buffers that follow each rank's batches: a checkpoint does not claim that they are equal, and every rank gets its
own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import local_buffer_runs
from tests.distributed.conftest import RunRanks

pytestmark = pytest.mark.distributed


def test_a_model_with_a_moving_average_of_its_own_resumes_whichever_way_it_was_saved(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    results = run_ranks(local_buffer_runs.saved_and_resumed, 2, tmp_path.as_uri())
    for way in local_buffer_runs.WAYS:
        rows = [result[way] for result in results]
        assert rows[0]["expected"] != rows[1]["expected"], "the ranks differ, or the test shows nothing"
        for row in rows:
            assert row["listed"] == ["layer.bias", "layer.weight", "scale"], f"{way}: the constant stays proved"
            assert row["start"] == 2, way
            assert row["found"] == row["expected"], way


def test_of_buffers_that_the_first_pass_makes_those_stay_compared_that_are_equal_on_all_ranks(
    run_ranks: RunRanks,
) -> None:
    clean = run_ranks(local_buffer_runs.made_in_the_first_pass, 3, None)
    assert clean[0]["scale"] != clean[1]["scale"], "the ranks differ, or the test shows nothing"
    assert [row["alarm"] for row in clean] == [None] * 3, "also audited from step 0 on"
    # The mask changes between the comparison after step 1 and the one after step 2; no audit's inputs are accused.
    flipped = run_ranks(local_buffer_runs.made_in_the_first_pass, 3, 2)
    assert {row["alarm"][0] for row in flipped} <= {"weights"}
    assert [row["alarm"][1:] for row in flipped] == [[2, [1]]] * 3


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_that_the_pass_writes_to_without_raising_their_version_accuse_nobody_and_hide_no_flip(
    run_ranks: RunRanks, broadcast: bool
) -> None:
    for audit_every in (None, 1):
        clean = run_ranks(local_buffer_runs.written_silently, 3, audit_every, None, forward_sync_buffers=broadcast)
        assert clean[0]["activity"] != clean[1]["activity"], "the ranks differ, or the test shows nothing"
        assert [row["alarm"] for row in clean] == [None] * 3
    # DDP may write to them once more: then the version is no longer what it was.
    assert all(row["silent"] for row in clean) or broadcast
    flipped = run_ranks(local_buffer_runs.written_silently, 3, None, 0, forward_sync_buffers=broadcast)
    assert [(row["alarm"], row["names"]) for row in flipped] == [(["weights", 2, [0]], ["scale"])] * 3
