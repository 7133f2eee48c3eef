"""Two real processes over Gloo: what one rank meets, both decide by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint_run import WAYS
from tests.distributed.conftest import (  # noqa: F401 - fixtures
    RunRanks,
    distributed_lock,
    process_context,
    run_ranks,
)
from tests.unit.custody import loader_ranks, two_ranks
from truestep.checkpoints import list_checkpoints

pytestmark = pytest.mark.distributed


@pytest.fixture
def both(run_ranks: RunRanks, tmp_path: Path) -> Any:  # noqa: F811 - the fixture
    """What each rank of a scenario returned, in rank order."""
    return lambda scenario: run_ranks(scenario, 2, (tmp_path / "checkpoints").as_uri(), str(tmp_path / "outbox"))


def test_each_rank_gets_back_its_own_random_numbers_and_running_statistics(both: Any, tmp_path: Path) -> None:
    results = both(two_ranks.save_then_resume)
    assert results[0]["expected"] != results[1]["expected"], "the ranks differ, or the test shows nothing"
    for result in results:
        assert result["found"] == result["expected"]
        assert (result["same"], result["start"]) == (True, 5)


def test_each_rank_gets_back_its_own_extra_state_and_what_is_the_same_is_written_once(both: Any) -> None:
    for rank, result in enumerate(both(two_ranks.extra_of_each_rank)):
        for way in WAYS:
            assert result[f"{way}, False"] == [[{"place": rank}], ["extra-00001.pt", "extra.pt"]], way
            assert result[f"{way}, True"] == [[{"place": "same"}], ["extra.pt"]], way


def test_a_save_that_fails_on_one_rank_raises_on_both_and_leaves_no_checkpoint(both: Any, tmp_path: Path) -> None:
    for result in both(two_ranks.fail_on_rank_1):
        assert result["error"] == "CheckpointWriteError"
        assert "checkpoint of step 4 was not written; rank 1: cannot write" in result["message"]
    assert list_checkpoints((tmp_path / "checkpoints").as_uri()) == []


def test_a_background_save_that_begins_on_one_rank_only_refuses_the_next_ones_on_both(
    both: Any, tmp_path: Path
) -> None:
    for result in both(two_ranks.no_memory_for_a_copy):
        assert "step 1 was not written; every rank: MemoryError" in result["1"]["message"]
        assert result["2"]["error"] is None, "no rank waits for another: the next save is as good as any"
        assert "step 3 was not written; rank 1: MemoryError" in result["3"]["message"]
        assert "step 4 was not written; the save in the background of step 3 began on some" in result["4"]["message"]
        assert "restart the training" in result["4"]["message"]
    assert [record.ref.step for record in list_checkpoints((tmp_path / "checkpoints").as_uri())] == [2]


def test_a_file_damaged_for_one_rank_makes_both_fall_back_with_the_same_sentence(both: Any, tmp_path: Path) -> None:
    results = both(two_ranks.corrupt_on_rank_1)
    assert results[0] == results[1]
    assert results[0]["older"] is True
    assert "refused; rank 1: " in results[0]["skipped"][0]
    assert "rng-00001.pt has SHA-256" in results[0]["skipped"][0]


def test_rank_0s_directive_decides_for_all(both: Any, tmp_path: Path) -> None:
    for result in both(two_ranks.nothing_ordered_exists):
        assert result["error"] == "NoUsableCheckpointError"
        assert "incident inc-1" in result["message"]


def test_no_rank_starts_during_an_open_incident_without_a_directive(both: Any) -> None:
    for result in both(two_ranks.over_a_tombstone):
        assert result["error"] == "TombstoneError"
        assert "ended this run at 2026-11-20T03:00:00Z and no resume directive answers it" in result["message"]


def test_ranks_with_different_roots_are_told_before_training_which_rank_has_which(both: Any, tmp_path: Path) -> None:
    for result in both(two_ranks.another_root):
        assert result["error"] == "CheckpointError"
        assert (
            f"checkpoints, rank 1 {tmp_path.as_uri()}/checkpoints1: give every rank the same root" in result["message"]
        )


def test_a_rank_that_sees_another_volume_is_named_at_the_start_and_at_the_resume(both: Any) -> None:
    for result in both(two_ranks.a_volume_of_its_own):
        assert result["started"]["error"] == "CheckpointError"
        assert "not the same storage on every rank: rank 1: the file that rank 0" in result["started"]["message"]
        assert result["resumed"]["error"] == "NoUsableCheckpointError"
        assert "refused; rank 1: its manifest is not the one that rank 0 read" in result["resumed"]["message"]


def test_a_run_over_a_stateful_loader_stopped_in_an_epoch_ends_bit_identical(
    run_ranks: RunRanks,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    results = run_ranks(loader_ranks.stopped_in_an_epoch, 2, tmp_path.as_uri())
    for (data, workers), stop in loader_ranks.STOPS.items():
        for rank in results:
            seen = rank[f"{data}-{workers}"]
            whole, again = seen["whole"], seen["again"]
            assert not whole["alarm"]
            assert seen["start"] == stop, (data, workers)
            assert [*seen["first"]["losses"], *again["losses"]] == whole["losses"], (data, workers)
            assert (again["weights"], again["optimizer"]) == (whole["weights"], whole["optimizer"]), (data, workers)
        losses = [rank[f"{data}-{workers}"]["whole"]["losses"] for rank in results]
        assert losses[0] != losses[1], "each rank has its own data, or the test shows nothing"
