"""Proves before training that audits can work: the same inputs give the same bits, here and on every other node.

What fails is downgraded openly (audits compare losses only, and no checkpoint becomes trusted) or refused, with what to
do. docs/doctor.md. `truestep.Guard(..., preflight=True)` runs it in front of the first step, `truestep doctor` on one
machine.
"""

from truestep.doctor.diagnosis import Diagnosis, Level, Observation
from truestep.doctor.examination import Examined, examine

__all__ = ["Diagnosis", "Examined", "Level", "Observation", "examine"]
