"""Two real processes over Gloo: what one rank meets, both decide by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truestep.checkpoints import list_checkpoints

SCRIPT = Path(__file__).parent / "two_ranks.py"
WORLD_SIZE = 2
pytestmark = pytest.mark.distributed


def run_ranks(scenario: str, tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank printed, in rank order."""
    root_uri, store = (tmp_path / "checkpoints").as_uri(), (tmp_path / "store").as_uri()
    command = [sys.executable, str(SCRIPT), scenario, root_uri, store, str(tmp_path / "outbox")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(WORLD_SIZE)
    ]
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
            results.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def test_each_rank_gets_back_its_own_random_numbers_and_running_statistics(tmp_path: Path) -> None:
    results = run_ranks("save_then_resume", tmp_path)
    assert results[0]["expected"] != results[1]["expected"], "the ranks differ, or the test shows nothing"
    for result in results:
        assert result["found"] == result["expected"]
        assert (result["same"], result["start"]) == (True, 5)


def test_a_save_that_fails_on_one_rank_raises_on_both_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    for result in run_ranks("fail_on_rank_1", tmp_path):
        assert result["error"] == "CheckpointWriteError"
        assert "checkpoint of step 4 was not written; rank 1: cannot write" in result["message"]
    assert list_checkpoints((tmp_path / "checkpoints").as_uri()) == []


def test_a_background_save_that_begins_on_one_rank_only_refuses_the_next_ones_on_both(tmp_path: Path) -> None:
    for result in run_ranks("no_memory_for_a_copy", tmp_path):
        assert "step 1 was not written; every rank: MemoryError" in result["1"]["message"]
        assert result["2"]["error"] is None, "no rank waits for another: the next save is as good as any"
        assert "step 3 was not written; rank 1: MemoryError" in result["3"]["message"]
        assert "step 4 was not written; the save in the background of step 3 began on some" in result["4"]["message"]
        assert "restart the training" in result["4"]["message"]
    assert [record.ref.step for record in list_checkpoints((tmp_path / "checkpoints").as_uri())] == [2]


def test_a_file_damaged_for_one_rank_makes_both_fall_back_with_the_same_sentence(tmp_path: Path) -> None:
    results = run_ranks("corrupt_on_rank_1", tmp_path)
    assert results[0] == results[1]
    assert results[0]["older"] is True
    assert "refused; rank 1: " in results[0]["skipped"][0]
    assert "rng-00001.pt has SHA-256" in results[0]["skipped"][0]


def test_rank_0s_directive_decides_for_all(tmp_path: Path) -> None:
    for result in run_ranks("nothing_ordered_exists", tmp_path):
        assert result["error"] == "NoUsableCheckpointError"
        assert "incident inc-1" in result["message"]
