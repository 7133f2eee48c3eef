"""Errors of planning.

TruestepError
└── PlanError   an input is outside its range; names the input, the range and the value given
"""

from __future__ import annotations

import math

from truestep.contract.errors import TruestepError

_LARGEST = 1e15
"""Hours, seconds, steps: beyond it the formulas run out of digits."""


class PlanError(TruestepError, ValueError):
    """An input is outside its range. The message names the input, its range and what was given."""


def require_probability(name: str, value: float, *, one_allowed: bool) -> None:
    """Raise `PlanError` unless 0 < value < 1, or value is 1 where that is allowed."""
    if not _is_number(value) or not (0 < value < 1 or (one_allowed and value == 1)):
        limit = "above 0 and at most 1" if one_allowed else "between 0 and 1, both excluded"
        raise PlanError(f"{name} is {value!r}; give a probability {limit}")


def require_positive(name: str, value: float, unit: str, *, zero_allowed: bool = False) -> None:
    """Raise `PlanError` unless the value is a finite number above 0, or 0 where that is allowed."""
    if not _is_number(value) or value < 0 or (value == 0 and not zero_allowed):
        limit = "of at least 0" if zero_allowed else "above 0"
        raise PlanError(f"{name} is {value!r}; give a finite number {limit}, in {unit}")
    if value > _LARGEST:
        raise PlanError(f"{name} is {value!r}; give at most {_LARGEST:g}, in {unit}")


def require_count(name: str, value: int, *, minimum: int = 1) -> None:
    """Raise `PlanError` unless the value is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise PlanError(f"{name} is {value!r}; give a whole number of at least {minimum}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
