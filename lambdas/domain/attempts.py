"""Attempts of a job, in the order in which they were heard of, and whether one has overtaken an alarm. Pure.

Trainers' clocks differ from ours and from each other. The order in which attempts are first heard of needs none.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from lambdas.domain.incident import parse_iso
from lambdas.domain.records import TrainingAttempt
from truestep.contract import Alarm

ATTEMPTS_KEPT: Final = 16
"""Of a job, the newest. A job that restarts more often while an alarm of it is on its way does not train."""


def with_sign(known: tuple[TrainingAttempt, ...], sign: TrainingAttempt) -> tuple[TrainingAttempt, ...]:
    """The attempts with one more sign of training: a known one keeps its place, and its newest sign."""
    for place, attempt in enumerate(known):
        if attempt.attempt_id == sign.attempt_id:
            newer = dataclasses.replace(attempt, seen_at=max(attempt.seen_at, sign.seen_at))
            return (*known[:place], newer, *known[place + 1 :])
    return (*known, sign)[-ATTEMPTS_KEPT:]


def heard_at(known: tuple[TrainingAttempt, ...], attempt_id: str) -> str:
    """When the attempt was first heard of; empty where it never was."""
    return next((attempt.heard_at for attempt in known if attempt.attempt_id == attempt_id), "")


def overtaken_by(alarm: Alarm, known: tuple[TrainingAttempt, ...]) -> TrainingAttempt | None:
    """The newest attempt that has trained since the alarm was raised, or None.

    An alarm that is taken for late stops nothing. So two things must say it: the other attempt was first heard of after
    the alarm's own, and it says itself that it trained after the alarm was raised. Where the alarm is the first that is
    heard of its attempt, the other one must have been heard of after it was raised.
    """
    own = next((place for place, one in enumerate(known) if one.attempt_id == alarm.run.attempt_id), None)
    raised = parse_iso(alarm.detected_at)
    later = known if own is None else known[own + 1 :]
    for attempt in reversed(later):
        if parse_iso(attempt.seen_at) > raised and (own is not None or parse_iso(attempt.heard_at) > raised):
            return attempt
    return None
