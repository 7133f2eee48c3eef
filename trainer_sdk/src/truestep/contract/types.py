"""Names for raw numbers and strings, so that a rank is never passed where a step is meant."""

from __future__ import annotations

from typing import NewType

Rank = NewType("Rank", int)
"""Rank in the data-parallel group, 0-based."""

Step = NewType("Step", int)
"""Optimizer step, 0-based: the step whose update has number `step`. Checkpoint s holds updates 0..s."""

NodeName = NewType("NodeName", str)
"""Kubernetes node name, e.g. ``hyperpod-i-0123456789abcdef0``."""

AlarmId = NewType("AlarmId", str)
IncidentId = NewType("IncidentId", str)
