"""Times as people read them, with how long ago where that is known."""

from __future__ import annotations

from datetime import datetime, timedelta

from lambdas.domain.incident import parse_iso
from truestep.contract.words import counted

_TODAY = timedelta(hours=12)


def moment(text: str, now: datetime, *, day: bool = True) -> str:
    """``02:29:58 UTC on 1 March 2026 (5 minutes ago)``; `text` as it is where it is no time.

    day: False leaves the day out of what was not long ago, in a list where it would be the same on every line.
    """
    try:
        at = parse_iso(text)
        distance = now - at
        near = timedelta(0) <= distance < _TODAY
        clock = f"{at:%H:%M:%S} UTC" + ("" if near and not day else f" on {at.day} {at:%B %Y}")
    except (ValueError, TypeError):
        # From an event, which may say anything.
        return text
    return f"{clock} ({duration(distance)} ago)" if distance >= timedelta(0) else clock


def duration(length: timedelta) -> str:
    """The two largest units at most: ``2 days 3 hours``, ``4 minutes``, ``12 seconds``."""
    seconds = max(0, int(length.total_seconds()))
    days, hours, minutes = seconds // 86_400, seconds // 3_600 % 24, seconds // 60 % 60
    if days:
        return _units((days, "day"), (hours, "hour"))
    if hours:
        return _units((hours, "hour"), (minutes, "minute"))
    return _units((minutes, "minute")) if minutes else _units((seconds, "second")) or "0 seconds"


def _units(*counts: tuple[int, str]) -> str:
    return " ".join(counted(count, unit) for count, unit in counts if count)
