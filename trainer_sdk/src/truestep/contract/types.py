"""Names for raw numbers and strings, so that a rank is never passed where a step is meant."""

from __future__ import annotations

import re
from typing import Final, NewType

Rank = NewType("Rank", int)
"""Rank in the data-parallel group, 0-based."""

Step = NewType("Step", int)
"""Optimizer step, 0-based: the step whose update has number `step`. Checkpoint s holds updates 0..s."""

NodeName = NewType("NodeName", str)
"""Kubernetes node name, e.g. ``hyperpod-i-0123456789abcdef0``."""

AlarmId = NewType("AlarmId", str)
IncidentId = NewType("IncidentId", str)

INCIDENT_ID: Final = re.compile(r"inc-[0-9a-f]{16}")
"""What an `IncidentId` of the recovery looks like. Orders by hand and a script's own directives have other ids."""
