"""What the counters count, without a training."""

from __future__ import annotations

from typing import Any

import pytest

from truestep.contract import Check
from truestep.metrics import Counters, counted


class Loop:
    """As a guard looks to its counters."""

    clean_through = None

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.checks: dict[str, int] = {}

    @counted("counters", last=True)
    def step(self, step: int, *checks: Check) -> int:
        self.checks |= dict.fromkeys(checks, step)
        return step


def test_a_check_counts_in_the_step_in_which_it_passed_and_in_no_later_one() -> None:
    told: list[tuple[int, dict[str, float]]] = []
    loop = Loop(Counters(lambda values, step: told.append((step, values))))
    assert loop.step(0, Check.NONFINITE) == 0
    loop.step(1, Check.NONFINITE, Check.WEIGHTS)
    loop.step(2, Check.NONFINITE)
    loop.step(3, Check.NONFINITE, Check.WEIGHTS)
    assert [step for step, _ in told] == [1, 3]
    assert told[1][1]["truestep/nonfinite_passed"] == 4
    assert told[1][1]["truestep/weights_passed"] == 2
    assert "truestep/clean_through" not in told[1][1], "none yet is no step 0"


def test_an_alarm_is_told_once_however_often_it_is_raised() -> None:
    told: list[tuple[int, float]] = []
    counters = Counters(lambda values, step: told.append((step, values["truestep/alarms"])))
    counters.alarm(7, 3)
    counters.alarm(7, 3)
    assert told == [(7, 1.0)]


def test_without_a_writer_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Counters())
    monkeypatch.setattr(Counters, "passed", None)
    monkeypatch.setattr(Counters, "spent", None)
    assert loop.step(0, Check.WEIGHTS) == 0


@pytest.mark.parametrize("given", [object(), "wandb", 3])
def test_what_cannot_be_called_is_refused_with_advice(given: Any) -> None:
    with pytest.raises(TypeError, match="add_scalar"):
        Counters(given)
