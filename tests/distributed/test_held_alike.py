"""Replicas may hold different buffers by the program's own will: nobody is accused of that, and faults are still
found."""

from __future__ import annotations

import pytest

from tests.distributed import held_alike_runs
from tests.distributed.conftest import RunRanks

pytestmark = pytest.mark.distributed


def test_what_the_program_itself_keeps_apart_accuses_nobody(run_ranks: RunRanks) -> None:
    for row in run_ranks(held_alike_runs.healthy, 3):
        assert row == {name: ["trained", "trained"] for name in held_alike_runs.HEALTHY}


def test_a_flip_in_what_was_equal_is_named_whoever_keeps_it_equal(run_ranks: RunRanks) -> None:
    for row in run_ranks(held_alike_runs.faulty, 3):
        assert row == {name: f"weights at 9: conclusive [1] {[name]}" for name in held_alike_runs.FAULTS}


def test_audits_are_refused_where_each_rank_has_parameters_of_its_own(run_ranks: RunRanks) -> None:
    for said in run_ranks(held_alike_runs.audited_with_own_parameters, 3):
        assert said.startswith("AuditSetupError: DDP ignores layer.own, and each rank has its own"), said
