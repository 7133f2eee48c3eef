"""The system's clock."""

from __future__ import annotations

from datetime import UTC, datetime


class SystemClock:
    """`lambdas.ports.Clock` on the wall clock."""

    def now(self) -> datetime:
        """The time now, in UTC, zone-aware."""
        return datetime.now(UTC)
