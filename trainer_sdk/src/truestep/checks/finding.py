"""What a check hands to the guard when it found something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from truestep.bundle.failing import FailingPass
from truestep.contract import Check, Verdict

SHOWN_NAMES = 32
"""Names listed in an alarm's evidence, which must stay bounded at any model size."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict and what it rests on; the same on every rank but for `failing`."""

    check: Check
    verdict: Verdict
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON, bounded at any world and model size."""
    failing: FailingPass | None = None
    """The computation that a bundle makes repeatable; set on every rank or on none, each with its own part."""
