"""Audits by period, by list and by function: the same steps, the same numbers, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from truestep.contract import Step
from truestep.schedule import Schedule


def due(schedule: Schedule, steps: int = 40) -> list[tuple[int, int]]:
    """(step, number of the audit)."""
    return [(step, schedule.audit_number(Step(step))) for step in range(steps) if schedule.audits(Step(step))]


@pytest.mark.parametrize(
    "audit_every",
    [10, [29, 9, 19, 39, 9], range(9, 40, 10), lambda step: step % 10 == 9],
    ids=["period", "list", "range", "function"],
)
def test_a_period_a_list_and_a_function_of_the_same_steps_are_the_same_schedule(audit_every: Any) -> None:
    assert due(Schedule(audit_every=audit_every)) == [(9, 0), (19, 1), (29, 2), (39, 3)]


def test_a_list_ends_and_step_0_can_be_audited() -> None:
    assert due(Schedule(audit_every=(0, 1, 7))) == [(0, 0), (1, 1), (7, 2)]


def dense_at_first(step: int) -> bool:
    return step < 4 or step % 10 == 0


def test_the_numbers_of_a_functions_audits_do_not_depend_on_where_the_run_resumed() -> None:
    whole = due(Schedule(audit_every=dense_at_first))
    assert whole == [(0, 0), (1, 1), (2, 2), (3, 3), (10, 4), (20, 5), (30, 6)]
    resumed = Schedule(audit_every=dense_at_first)
    assert [(step, resumed.audit_number(Step(step))) for step in (30, 10, 20)] == [(30, 6), (10, 4), (20, 5)]


def test_counting_asks_the_function_once_a_step() -> None:
    asked: list[int] = []

    def every_tenth(step: int) -> bool:
        asked.append(step)
        return step % 10 == 9

    schedule = Schedule(audit_every=every_tenth)
    for step in range(1000):
        if step % 10 == 9:
            schedule.audit_number(Step(step))
    assert len(asked) <= 1000 + 100, "once for the count, once for each audit itself"


@pytest.mark.parametrize("audit_every", [0, -3, True, 2.5, "10", b"10", [], [3, -1], [3, True], [1.0], [[1]], object()])
def test_what_is_no_schedule_is_refused_by_name(audit_every: Any) -> None:
    with pytest.raises(ValueError, match=r"Schedule\.audit_every"):
        Schedule(audit_every=audit_every)


@pytest.mark.parametrize("answer", [lambda _: 1, lambda _: None])
def test_a_function_that_does_not_say_true_or_false_is_refused_with_its_step(answer: Callable[[int], Any]) -> None:
    with pytest.raises(TypeError, match=r"audit_every\(7\) returned"):
        Schedule(audit_every=answer).audits(Step(7))


def test_ranks_that_disagree_on_any_check_have_different_numbers_of_what_is_due() -> None:
    here = Schedule(audit_every=4, check_every=3, checkpoint_every=6)
    others = [
        Schedule(audit_every=8, check_every=3, checkpoint_every=6),
        Schedule(audit_every=[11], check_every=3, checkpoint_every=6),
        Schedule(audit_every=4, check_every=2, checkpoint_every=6),
        Schedule(audit_every=4, check_every=3, checkpoint_every=3),
    ]
    numbers = [[schedule.due(Step(step)) for step in range(12)] for schedule in (here, *others)]
    assert len({tuple(row) for row in numbers}) == 5
    assert here.due(Step(11)) != others[1].due(Step(11)), "another audit's number means other pairs"
