"""truestep: catches GPUs that return wrong numbers without an error while PyTorch trains on them.

Importing this package pulls in neither torch nor boto3: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from truestep.attachment import Attachment, attach
    from truestep.bundle import BundleSettings
    from truestep.checkpoints import VerifiedCheckpoints
    from truestep.contract import Alarm, ContractError, TruestepError, Verdict, VerdictCause, VerdictKind
    from truestep.guard import CorruptionDetected, Guard
    from truestep.peer_failure import PeerFailedError
    from truestep.report import report_sdc
    from truestep.resumption import resume
    from truestep.schedule import Schedule
    from truestep.sharded import ShardedGuard
    from truestep.training_loop import LeftError, train

__version__ = "0.1.0"

_HOME = {
    "Alarm": "truestep.contract",
    "Attachment": "truestep.attachment",
    "BundleSettings": "truestep.bundle",
    "ContractError": "truestep.contract",
    "CorruptionDetected": "truestep.guard",
    "Guard": "truestep.guard",
    "LeftError": "truestep.training_loop",
    "PeerFailedError": "truestep.peer_failure",
    "Schedule": "truestep.schedule",
    "ShardedGuard": "truestep.sharded",
    "TruestepError": "truestep.contract",
    "Verdict": "truestep.contract",
    "VerdictCause": "truestep.contract",
    "VerdictKind": "truestep.contract",
    "VerifiedCheckpoints": "truestep.checkpoints",
    "attach": "truestep.attachment",
    "report_sdc": "truestep.report",
    "resume": "truestep.resumption",
    "train": "truestep.training_loop",
}

__all__ = [
    "Alarm",
    "Attachment",
    "BundleSettings",
    "ContractError",
    "CorruptionDetected",
    "Guard",
    "LeftError",
    "PeerFailedError",
    "Schedule",
    "ShardedGuard",
    "TruestepError",
    "Verdict",
    "VerdictCause",
    "VerdictKind",
    "VerifiedCheckpoints",
    "attach",
    "report_sdc",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
