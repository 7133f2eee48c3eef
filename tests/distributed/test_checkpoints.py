"""Checkpoints by `torch.distributed.checkpoint`, in the background too: trusted, resumed from, read in other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import checkpoint_runs
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed

BACKGROUND = {"distributed": True, "asynchronous": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "shares": {"audit_every": 4, "save_every": 1, "distributed": True},
    "shares in the background": {"audit_every": 6, "save_every": 2, **BACKGROUND},
    "in the background, saved at every audit": {"audit_every": 4, "save_every": 4, **BACKGROUND},
}
DETECTED = {"shares": 7, "shares in the background": 11, "in the background, saved at every audit": 7}


def test_a_corrupted_run_resumes_from_before_the_fault_and_ends_as_if_it_had_never_been(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    results = run_ranks(checkpoint_runs.recovered_runs, 3, tmp_path.as_uri(), SETTINGS)
    for name, setting in SETTINGS.items():
        rows = [row[name] for row in results]
        alarm = Alarm.from_json(same_everywhere(rows, "alarm"))
        audit_every, save_every = setting["audit_every"], setting["save_every"]
        assert (alarm.suspect_ranks, alarm.step) == ((2,), DETECTED[name]), name
        clean_through = DETECTED[name] - audit_every
        written = range(save_every - 1, DETECTED[name], save_every)
        expected = {str(step): "trusted" if step <= clean_through else "written" for step in written}
        assert same_everywhere(rows, "trust") == expected, name
        assert same_everywhere(rows, "start") == clean_through + 1 <= checkpoint_runs.FAULT_STEP, name
        assert same_everywhere(rows, "second alarm") is None
        assert same_everywhere(rows, "newest trusted") == checkpoint_runs.STEPS - 1, name
        assert sum(file.endswith(".distcp") for file in rows[0]["files"]) == 3, name
        for plain, row in zip(results, rows, strict=True):
            assert row["state"]["losses"] == plain["clean"]["losses"][clean_through + 1 :], name
            assert {**row["state"], "losses": None} == {**plain["clean"], "losses": None}, name


def test_a_background_save_that_fails_on_one_rank_is_said_on_every_rank_and_does_not_exist(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    root = tmp_path.as_uri() + "/checkpoints"
    for row in run_ranks(checkpoint_runs.failing_background_save, 2, root):
        assert "checkpoint of step 3 was not written; every rank: rank 1: disk quota exceeded" in row["said"]
        assert "3" not in row["trust"]
        assert "1" in row["trust"]


def test_shards_are_saved_with_their_copies_and_loaded_into_other_shapes(run_ranks: RunRanks, tmp_path: Path) -> None:
    root = tmp_path.as_uri() + "/checkpoints"
    saved = run_ranks(checkpoint_runs.saved_sharded, 4, root)
    at_3 = same_everywhere(saved, "at 3")
    assert same_everywhere(saved, "start") == 4
    assert same_everywhere(saved, "again") == same_everywhere(saved, "whole")
    assert at_3 != same_everywhere(saved, "whole")
    others = run_ranks(checkpoint_runs.resumed_in_another_shape, 2, root)
    assert same_everywhere(others, "sharded") == at_3
    assert same_everywhere(others, "ddp") == at_3
    refused = same_everywhere(others, "refused")
    assert "written by 4 ranks and this run has 2" in refused
    assert "reshard=True" in refused
