"""Counts as people read them; every message of the SDK and of the recovery takes them from here."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 pod``, ``2 pods``, ``12,000 steps``. plural: where it is more than the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def plainly(token: str) -> str:
    """``awaiting approval`` of ``awaiting_approval``: a status or an outcome as people read it."""
    return token.replace("_", " ")
