"""Counters of the checks, for whatever plots the training: one callable, which the user gives to `attach`.

    attachment = attach(ddp_model, metrics=wandb.run.log)      # or any callable(values, step)

It gets plain Python numbers that the checks had in hand anyway: nothing is computed, copied from a device or sent for
it. Without one nothing is counted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

from truestep.contract import Check

_log = logging.getLogger(__name__)
_Call = TypeVar("_Call", bound=Callable[..., Any])

WriteMetrics = Callable[[dict[str, float], int], Any]
"""``metrics(values, step)``: counter's name -> value, and the step that they hold for."""
_EVERY_STEP = frozenset({str(Check.NONFINITE), str(Check.REDUCTION)})


class Counters:
    """Counts of one process and attempt; they start at 0 again when training is started again.

    Called after every step in which a check passed that does not run in every step, and at once on an alarm, with

    - ``truestep/<check>_passed``: how often the check passed, check as in an alarm (``ring_replay``, ``weights``, ...),
    - ``truestep/clean_through``: newest step at which every check that sees computation faults passed; none before,
    - ``truestep/alarms``: 0 or 1,
    - ``truestep/check_seconds``: host seconds in the guard's calls so far; on a GPU they include the wait for kernels
      of the backward that were still running,
    - ``truestep/audit_seconds``: host seconds of the newest audit, which starts when the backward is done.
    """

    def __init__(self, write: WriteMetrics | None = None) -> None:
        """Raises `TypeError` where `write` cannot be called."""
        if write is not None and not callable(write):
            raise TypeError(
                f"metrics is a callable(values, step), got {type(write).__name__}; for a SummaryWriter give a function "
                "that calls its add_scalar for each value"
            )
        self._write = write
        self._passed: Counter[str] = Counter()
        self._seconds = 0.0
        self._audit_seconds: float | None = None
        self._alarmed = False
        self._said = False

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return self._write is not None

    @contextmanager
    def audit(self) -> Iterator[None]:
        """Around an audit."""
        started = time.perf_counter()
        yield
        self._audit_seconds = time.perf_counter() - started

    def spent(self, seconds: float) -> None:
        """A guard's call took so long."""
        self._seconds += seconds

    def passed(self, checks: Mapping[str, int], clean_through: int | None) -> None:
        """A step is over. checks: name -> newest step at which the check passed."""
        step = max(checks.values(), default=-1)
        now = {str(check) for check, at in checks.items() if at == step}
        self._passed.update(now)
        if now - _EVERY_STEP:
            self._tell(step, clean_through)

    def alarm(self, step: int, clean_through: int | None) -> None:
        """The checks of `step` found corruption. Told once, however often the guard raises it."""
        if not self._alarmed:
            self._alarmed = True
            self._tell(step, clean_through)

    def _tell(self, step: int, clean_through: int | None) -> None:
        if self._write is None:
            return
        values = {f"truestep/{check}_passed": float(count) for check, count in sorted(self._passed.items())}
        values |= {"truestep/alarms": float(self._alarmed), "truestep/check_seconds": self._seconds}
        if clean_through is not None:
            values["truestep/clean_through"] = float(clean_through)
        if self._audit_seconds is not None:
            values["truestep/audit_seconds"] = self._audit_seconds
        try:
            self._write(values, step)
        except Exception:
            if not self._said:
                self._said = True
                _log.warning("the metrics callable failed; training goes on, and this is said once", exc_info=True)


def counted(counters: str, *, last: bool) -> Callable[[_Call], _Call]:
    """Around a method of a guard. counters: where the guard has them, as ``_attachment.counters``; last: a step ends
    with this method."""
    of = attrgetter(counters)

    def around(call: _Call) -> _Call:
        @functools.wraps(call)
        def counting(guard: Any, *arguments: Any, **keywords: Any) -> Any:
            own: Counters = of(guard)
            if not own.wanted:
                return call(guard, *arguments, **keywords)
            from truestep.checks.alarms import CorruptionDetected

            started = time.perf_counter()
            try:
                result = call(guard, *arguments, **keywords)
            except CorruptionDetected as found:
                own.spent(time.perf_counter() - started)
                own.alarm(int(found.alarm.step), guard.clean_through)
                raise
            own.spent(time.perf_counter() - started)
            if last:
                own.passed(guard.checks, guard.clean_through)
            return result

        return counting  # type: ignore[return-value]

    return around
