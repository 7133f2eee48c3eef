"""What the SDK's own collectives give at every number of ranks."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.conftest import RunRanks
from truestep.collectives import CpuGroup, _Maxima

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


HANGS_SECONDS = 60.0
"""A tenth of what the group's own time-out takes."""

CALLS: dict[str, Callable[[CpuGroup], Any]] = {
    "extremes": lambda group: group.extremes([group.rank]),
    "gather_rows": lambda group: group.gather_rows({"rank": group.rank}),
    "gather_bytes": lambda group: group.gather_bytes(b"x"),
    "broadcast_bytes": lambda group: group.broadcast_bytes(b"x", 0),
    "exchange": lambda group: group.exchange([(0, 1)], b"x"),
    "barrier": lambda group: group.barrier(),
}


def a_new_group() -> tuple[CpuGroup, Any]:
    """A group whose connections are all made, and a store to tell the other ranks by."""
    assert dist.group.WORLD is not None
    group = CpuGroup(dist.group.WORLD)
    group.extremes([1])
    return group, dist.group.WORLD.get_group_store()


def failure_of(call: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    said = ""
    try:
        call()
    except (RuntimeError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.monotonic() - began}


def tries_after_lost_connections(rank: int, name: str) -> list[dict[str, Any]]:
    """Rank 0 loses its connections before rank 5, a child of rank 1, has come. Everybody tries once more, as a loop
    does that catches RuntimeError over a bad batch."""
    group, store = a_new_group()
    if rank == 0:
        group.interrupt()
        store.set("lost", "1")
    if rank == 5:
        store.wait(["lost"])
    return [failure_of(partial(CALLS[call], group)) for call in (name, name, "extremes")]


def interrupt_once_in_an_exchange(main: int, store: Any) -> None:
    """A Ctrl-C is heard when the wait at hand is over: between the receipts of two ranks."""
    while sys._current_frames()[main].f_code is not _Maxima.of.__code__:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    store.set("interrupted", "1")


def tries_after_a_ctrl_c(rank: int) -> list[dict[str, Any]]:
    """Rank 0 is interrupted while it waits for the others, as in a notebook, and goes on."""
    group, store = a_new_group()
    if rank == 0:
        threading.Thread(target=interrupt_once_in_an_exchange, args=(threading.get_ident(), store)).start()
    else:
        store.wait(["interrupted"])
    return [failure_of(lambda: group.extremes([rank])) for _ in range(2)]


def interrupted_beside_a_lost_rank(rank: int) -> dict[str, Any]:
    """Rank 0's connection to rank 1 is closed already when it is to give up waiting; rank 2 waits for rank 0."""
    group, store = a_new_group()
    if rank == 1:
        group.interrupt()
        store.set("lost", "1")
    if rank == 0:
        store.wait(["lost"])
        group.interrupt()
    return failure_of(lambda: group.extremes([rank])) if rank == 2 else {}


def ranks_in_unequally_many_groups(rank: int) -> list[tuple[int, int]]:
    """Two of the ranks have a group of their own besides."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    group, _ = a_new_group()
    return group.extremes([rank])


def test_a_group_is_made_also_where_ranks_are_in_unequally_many_others(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.distributed.conftest.TIMEOUT_SECONDS", HANGS_SECONDS)
    assert run_ranks(ranks_in_unequally_many_groups, 3) == [[[0, 2]]] * 3


@pytest.mark.parametrize("name", CALLS)
def test_after_a_failed_exchange_every_rank_hears_of_it_and_every_later_one_fails_at_once(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tests.distributed.conftest.TIMEOUT_SECONDS", HANGS_SECONDS)
    for rank, row in enumerate(run_ranks(tries_after_lost_connections, 6, name)):
        assert max(one["seconds"] for one in row) < HANGS_SECONDS / 3, row
        if name in ("extremes", "gather_rows", "gather_bytes", "barrier"):
            assert row[0]["said"], f"rank {rank} needed rank 0"
        assert row[2]["said"].startswith("RuntimeError: "), f"rank {rank} went on"


def test_an_exchange_that_was_interrupted_half_way_is_not_gone_on_with(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.distributed.conftest.TIMEOUT_SECONDS", HANGS_SECONDS)
    first, *others = run_ranks(tries_after_a_ctrl_c, 3)
    assert first[0]["said"].startswith("KeyboardInterrupt")
    assert "an exchange between the ranks failed before (KeyboardInterrupt: )" in first[1]["said"]
    for row in others:
        assert row[0]["said"].startswith("RuntimeError: ")
        assert "start the processes again" in row[1]["said"]


def test_a_rank_gives_up_all_waits_also_where_one_of_its_connections_is_closed_already(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.distributed.conftest.TIMEOUT_SECONDS", HANGS_SECONDS)
    assert run_ranks(interrupted_beside_a_lost_rank, 3)[2]["said"].startswith("RuntimeError: ")
