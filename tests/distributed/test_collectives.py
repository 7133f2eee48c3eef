"""What the SDK's own collectives give at every number of ranks."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from tests.distributed.conftest import RunRanks
from truestep.collectives import CpuGroup

pytestmark = pytest.mark.distributed

INT64 = -(2**63), 2**63 - 1


def values_of(rank: int, call: int) -> list[int]:
    """Any int64, and often the same ones, so that ranks also agree."""
    numbers = random.Random(1000 * call + rank)  # noqa: S311 - the same on every run
    some = [numbers.randint(*INT64), numbers.choice(INT64), numbers.randint(-1, 1), call]
    return some if call % 2 else some + [numbers.randint(*INT64) for _ in range(call % 30)]


def extremes_of_40_calls(rank: int) -> list[list[tuple[int, int]]]:
    """Nothing but the calls themselves holds a rank back that is ahead of the others."""
    assert dist.group.WORLD is not None
    group = CpuGroup(dist.group.WORLD)
    return [group.extremes(values_of(rank, call)) for call in range(40)]


@pytest.mark.parametrize("ranks", [2, 5, 7])
def test_extremes_are_those_of_all_ranks_whatever_their_number(run_ranks: RunRanks, ranks: int) -> None:
    of_all = [zip(*(values_of(rank, call) for rank in range(ranks)), strict=True) for call in range(40)]
    expected = [[[min(column), max(column)] for column in columns] for columns in of_all]
    assert run_ranks(extremes_of_40_calls, ranks) == [expected] * ranks
