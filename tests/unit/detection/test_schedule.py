"""Which step is due for which check, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from truestep.checks.determinism import DeterministicKernels, collect_nondeterministic
from truestep.contract import IdentityRow, NodeName, Rank, Step
from truestep.identity import local_identity, software_differences
from truestep.schedule import Schedule


def due(test: Any, steps: int = 40) -> list[int]:
    return [step for step in range(steps) if test(Step(step))]


def test_a_period_of_ten_is_due_at_9_19_29() -> None:
    schedule = Schedule(audit_every=10, check_every=20, checkpoint_every=15)
    assert due(schedule.audits) == [9, 19, 29, 39]
    assert due(schedule.saves) == [14, 29]
    assert due(schedule.compares_weights) == [14, 19, 29, 39], "also before every checkpoint"
    assert [schedule.audit_number(Step(step)) for step in (9, 19, 29)] == [0, 1, 2]


def test_checkpoints_follow_the_weight_check_by_default_and_audits_can_be_off() -> None:
    schedule = Schedule(audit_every=None, check_every=5)
    assert due(schedule.saves, 11) == due(schedule.compares_weights, 11) == [4, 9]
    assert due(schedule.audits) == []


@pytest.mark.parametrize(
    "fields", [{"audit_every": 0}, {"check_every": None}, {"checkpoint_every": -1}, {"check_every": 1.5}]
)
def test_periods_that_are_not_positive_whole_numbers_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Schedule.{next(iter(fields))}"):
        Schedule(**{"audit_every": 10, **fields})


def test_deterministic_kernels_are_switched_back_to_what_the_user_had() -> None:
    kernels = DeterministicKernels()
    filters = list(warnings.filters)
    kernels.switch_on()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    kernels.switch_back()
    kernels.switch_back()
    assert not torch.are_deterministic_algorithms_enabled()
    assert warnings.filters == filters


def test_a_kernel_without_a_deterministic_version_is_noted_and_does_not_raise() -> None:
    kernels = DeterministicKernels()
    kernels.switch_on()
    try:
        for _ in range(2):
            with collect_nondeterministic() as found:
                torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
            assert len(found) == 1
            assert "put_" in found[0]
        with collect_nondeterministic() as found:
            torch.ones(3, 3) @ torch.ones(3, 3)
        assert found == []
    finally:
        kernels.switch_back()


def test_identity_comes_from_the_downward_api_and_not_from_names() -> None:
    row = local_identity(
        5, "attempt", {"NODE_NAME": "n1", "POD_NAME": "job-worker-3", "LOCAL_RANK": "1", "JOB_RESTART_COUNT": "2"}
    )
    assert (row.rank, row.local_rank, row.node_name, row.restart_count) == (5, 1, "n1", 2)
    assert row.num_threads == torch.get_num_threads()
    assert local_identity(0, "a", {}).node_name, "the host's name where the pod does not say its node"
    with pytest.raises(ValueError, match="LOCAL_RANK is 'x'"):
        local_identity(0, "a", {"LOCAL_RANK": "x"})


def test_differences_that_make_bits_incomparable_are_said_with_their_ranks() -> None:
    rows = [
        IdentityRow(rank=Rank(r), local_rank=0, node_name=NodeName("n"), num_threads=2 if r == 1 else 1)
        for r in range(3)
    ]
    (sentence,) = software_differences(rows)
    assert "num_threads" in sentence
    assert "2 on ranks 1" in sentence
    assert software_differences(rows[:1]) == []
