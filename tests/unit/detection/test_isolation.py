"""Isolation of replays from torch.distributed, also where replays overlap in time, or a backward leaves the thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from truestep.checks import isolation
from truestep.checks.isolation import CommunicationInReplayError, isolated


def test_isolations_that_overlap_in_two_threads_leave_the_group_as_it_was() -> None:
    before = dict(vars(ProcessGroup))
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with isolated(None):
            entered.set()
            leave.wait(20)

    first = isolated(None)
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
    with isolated(None):
        with isolated(None):
            pass
        assert ProcessGroup.allreduce is not before["allreduce"]
    assert dict(vars(ProcessGroup)) == before


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """This process is rank 0 of 1."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Nested(torch.autograd.Function):
    """Its backward runs another one inside; beyond 60 of them autograd goes on in threads of its own."""

    answers: list[tuple[int, Any]]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, depth: int) -> torch.Tensor:  # type: ignore[override]
        ctx.depth = depth
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.depth:
            with torch.enable_grad():
                inner = Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1)  # type: ignore[no-untyped-call]
            inner.backward()
            return gradient, None
        try:
            dist.all_reduce(torch.ones(1))
            answer: Any = "communicated"
        except CommunicationInReplayError:
            answer = dist.get_rank() if dist.get_world_size() == 1 else None
        Nested.answers.append((threading.get_ident(), answer))
        return gradient, None


def _backward() -> tuple[int, Any]:
    Nested.answers = []
    Nested.apply(torch.ones(1, requires_grad=True), 80).backward()  # type: ignore[no-untyped-call]
    ((thread, answer),) = Nested.answers
    return thread, answer


def test_autograds_own_threads_are_isolated_with_the_thread_whose_backward_they_run(process_group: None) -> None:
    thread, answer = _backward()
    assert (thread != threading.get_ident(), answer) == (True, "communicated")
    with isolated(5):
        thread, answer = _backward()
        assert (thread != threading.get_ident(), answer) == (True, 5)
        assert dist.get_rank() == 5
        seen: list[Any] = []
        other = threading.Thread(target=lambda: seen.append((dist.get_rank(), *_backward()[1:])))
        other.start()
        other.join(20)
        assert seen == [(0, "communicated")]
    assert dist.get_rank() == 0
    assert _backward()[1] == "communicated"


def test_code_that_is_compiled_in_a_replay_keeps_this_ranks_number_and_is_refused(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation._patches, "compiled_rank", False)
    ask = torch.compile(lambda value: value + dist.get_rank(), backend="eager")
    with pytest.raises(CommunicationInReplayError, match="becomes a constant"), isolated(5):
        ask(torch.zeros(1))
    assert ask(torch.zeros(1)).item() == 0, "training runs the same code"
    with pytest.raises(CommunicationInReplayError, match="becomes a constant"), isolated(5):
        pass
