"""Which steps are audited, and the number of each audit: a period, a list of steps, or a function of the step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Protocol, TypeGuard

from truestep.contract import Step, TruestepError

AuditEvery = int | Iterable[int] | Callable[[int], bool]


class ScheduleError(TruestepError):
    """The ranks follow different schedules. Raised on every rank, before one would wait for the others for ever."""


class AuditSteps(Protocol):
    """What a schedule asks."""

    def includes(self, step: Step) -> bool:
        """Whether `step` is audited."""

    def number(self, step: Step) -> int:
        """Audited steps before `step`, counted from the run's first step also where it was resumed: an interruption
        must not change who replays whom."""


def audit_steps(chosen: AuditEvery | None) -> AuditSteps:
    """Raises `ValueError` for what is neither a period, nor steps, nor callable; None: no step."""
    if chosen is None:
        return _Listed(())
    if callable(chosen):
        return _Asked(chosen)
    if isinstance(chosen, Iterable) and not isinstance(chosen, (str, bytes)):
        return _listed(list(chosen))
    if not _is_count(chosen) or chosen < 1:
        raise ValueError(
            f"Schedule.audit_every is {chosen!r}; give a number of steps of at least 1, the steps to audit, "
            "callable(step), or None for no audits"
        )
    return _Period(chosen)


class _Period:
    def __init__(self, period: int) -> None:
        self._period = period

    def includes(self, step: Step) -> bool:
        return (step + 1) % self._period == 0

    def number(self, step: Step) -> int:
        return step // self._period


class _Listed:
    def __init__(self, steps: tuple[int, ...]) -> None:
        self._steps = steps

    def includes(self, step: Step) -> bool:
        place = bisect_left(self._steps, step)
        return place < len(self._steps) and self._steps[place] == step

    def number(self, step: Step) -> int:
        return bisect_left(self._steps, step)


class _Asked:
    def __init__(self, answer: Callable[[int], bool]) -> None:
        self._answer = answer
        self._counted, self._audits = 0, 0

    def includes(self, step: Step) -> bool:
        answer = self._answer(step)
        if not isinstance(answer, bool):
            raise TypeError(f"Schedule.audit_every({step}) returned {answer!r}; it must return True or False")
        return answer

    def number(self, step: Step) -> int:
        if step < self._counted:
            self._counted, self._audits = 0, 0
        self._audits += sum(self.includes(Step(earlier)) for earlier in range(self._counted, step))
        self._counted = step
        return self._audits


def _listed(given: list[object]) -> _Listed:
    if not given:
        raise ValueError("Schedule.audit_every has no steps; give at least one, or None for no audits")
    wrong = [step for step in given if not _is_count(step)]
    if wrong:
        raise ValueError(f"Schedule.audit_every has the step {wrong[0]!r}; steps are whole numbers from 0 on")
    return _Listed(tuple(sorted({step for step in given if _is_count(step)})))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
