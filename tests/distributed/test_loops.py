"""Loops of one's own that leave calls out are told which; those that skip batches or train two models leave nothing
behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import loop_runs
from tests.distributed.conftest import RunRanks

pytestmark = pytest.mark.distributed

NOTHING: dict[str, Any] = {
    "in front of forwards": 0,
    "on gradients": 0,
    "on the update": 0,
    "deterministic": False,
}


def test_a_loop_without_before_update_is_told_before_a_nan_is_saved(run_ranks: RunRanks) -> None:
    for row in run_ranks(loop_runs.without_before_update, 3):
        assert row["said"].startswith("ValueError: after_update without before_update"), row
        assert row["saved"] == []


def test_a_loop_without_start_step_is_told_which_call_is_missing(run_ranks: RunRanks) -> None:
    for row in run_ranks(loop_runs.without_start_step, 3):
        for case, said in row.items():
            assert said.startswith("ValueError: before_update without a recorded pass"), (case, said)


def test_skipped_batches_leave_nothing_behind_and_the_others_are_judged(run_ranks: RunRanks) -> None:
    for row in run_ranks(loop_runs.skipped_batches, 3):
        assert row["last judged"] == row["last left"] == NOTHING
        assert (row["checks"]["ring_replay"], row["checks"]["nonfinite"]) == (23, 24)


def test_training_that_is_left_over_an_exception_leaves_nothing_behind(run_ranks: RunRanks) -> None:
    for row in run_ranks(loop_runs.failed_training, 1):
        assert row == {"said": "ValueError: a label is out of range", **NOTHING}


def test_functions_and_objects_in_a_parameter_group_are_no_difference_between_ranks(run_ranks: RunRanks) -> None:
    for row in run_ranks(loop_runs.code_in_settings, 3):
        assert (row["said"], row["saved"]) == ("", [1, 3])
        assert (row["checks"]["optimizer_state"], row["checks"]["update_replay"]) == (3, 3)


def test_two_guards_whose_steps_interleave_give_the_users_modes_back(run_ranks: RunRanks) -> None:
    for row in run_ranks(loop_runs.two_models, 3):
        assert [checks["ring_replay"] for checks in row.pop("checks")] == [5, 5]
        assert row == {"fill": True, **NOTHING}
