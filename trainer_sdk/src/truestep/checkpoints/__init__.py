"""Checkpoints that can be trusted. Names load on first use: the catalogue and the storage need no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from truestep.checkpoints.catalogue import CheckpointRecord, Trust, list_checkpoints
    from truestep.checkpoints.errors import (
        CheckpointCorruptError,
        CheckpointError,
        CheckpointWriteError,
        MissingExtraError,
        NoUsableCheckpointError,
        ResumeError,
        StorageError,
        TombstoneError,
    )
    from truestep.checkpoints.verified import VerifiedCheckpoints

_HOME = {
    "CheckpointCorruptError": "errors",
    "CheckpointError": "errors",
    "CheckpointRecord": "catalogue",
    "CheckpointWriteError": "errors",
    "MissingExtraError": "errors",
    "NoUsableCheckpointError": "errors",
    "ResumeError": "errors",
    "StorageError": "errors",
    "TombstoneError": "errors",
    "Trust": "catalogue",
    "VerifiedCheckpoints": "verified",
    "list_checkpoints": "catalogue",
}

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointRecord",
    "CheckpointWriteError",
    "MissingExtraError",
    "NoUsableCheckpointError",
    "ResumeError",
    "StorageError",
    "TombstoneError",
    "Trust",
    "VerifiedCheckpoints",
    "list_checkpoints",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
