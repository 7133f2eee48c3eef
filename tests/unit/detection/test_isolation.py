"""Isolation of replays from torch.distributed, also where replays overlap in time."""

from __future__ import annotations

import threading

from torch.distributed import ProcessGroup

from truestep.checks.isolation import without_communication


def test_isolations_that_overlap_in_two_threads_leave_the_group_as_it_was() -> None:
    before = dict(vars(ProcessGroup))
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with without_communication():
            entered.set()
            leave.wait(20)

    first = without_communication()
    first.__enter__()
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    assert ProcessGroup.allreduce is not before["allreduce"]
    first.__exit__(None, None, None)
    leave.set()
    thread.join(20)
    assert dict(vars(ProcessGroup)) == before


def test_isolations_nest_in_one_thread() -> None:
    before = dict(vars(ProcessGroup))
    with without_communication():
        with without_communication():
            pass
        assert ProcessGroup.allreduce is not before["allreduce"]
    assert dict(vars(ProcessGroup)) == before
