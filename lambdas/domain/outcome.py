"""What a state of the workflow answers: one word that Choice states branch on, and the sentence behind it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """The words of ``outcome``; which state answers which is the table in docs/architecture.md."""

    PROCEED = "proceed"
    CLOSED = "closed"
    ESCALATE = "escalate"
    PENDING = "pending"
    RESOLVED = "resolved"
    AMBIGUOUS = "ambiguous"
    NODE_GONE = "node_gone"
    CORDONED = "cordoned"
    LEFT_THEIRS = "left_theirs"
    RECORDED = "recorded"
    STOPPED = "stopped"
    READ = "read"
    SKIPPED = "skipped"
    STARTED = "started"
    DEFERRED = "deferred"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"
    SETTLED = "settled"
    REQUESTED = "requested"
    ALREADY_REPLACED = "already_replaced"
    READY = "ready"
    RELEASED = "released"
    LEFT_ALONE = "left_alone"
    CHOSEN = "chosen"
    RELAUNCHED = "relaunched"
    VERIFIED = "verified"
    WAITING = "waiting"
    """A token state has stored its token. Nobody branches on it: the state ends when the token is completed."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a handler returns to the state machine; never grows with the incident."""

    incident_id: str
    outcome: Outcome
    reason: str
    wait_seconds: int | None = None
    """Only with ``pending``: when to ask again."""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.PENDING) != (self.wait_seconds is not None):
            raise ValueError(f"wait_seconds goes with pending and only with it, got {self.outcome} {self.wait_seconds}")

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "incident_id": self.incident_id,
            "outcome": str(self.outcome),
            "reason": self.reason[:1000],
        }
        if self.wait_seconds is not None:
            document["wait_seconds"] = self.wait_seconds
        return document
