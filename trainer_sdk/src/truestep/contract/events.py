"""Events between training and recovery: sources, detail types, and which schema a detail must match."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any

from truestep.contract.alarm import RunRef
from truestep.contract.checkpoint import CheckpointRef
from truestep.contract.types import Step

SOURCE_TRAINING = "truestep.training"
SOURCE_RECOVERY = "truestep.recovery"
EVENT_SCHEMA_VERSION = 1


class DetailType(StrEnum):
    """EventBridge ``detail-type`` of what training sends."""

    ALARM = "Training Corruption Alarm"
    CHECKPOINT_WRITTEN = "Training Checkpoint Written"
    CHECKPOINT_TRUSTED = "Training Checkpoint Trusted"
    RESUMED = "Training Resumed"
    VERIFIED = "Training Verified"


_SCHEMA_FILES = {
    DetailType.ALARM: "alarm-v1.json",
    DetailType.CHECKPOINT_WRITTEN: "checkpoint-v1.json",
    DetailType.CHECKPOINT_TRUSTED: "checkpoint-v1.json",
    DetailType.RESUMED: "resume-v1.json",
    DetailType.VERIFIED: "resume-v1.json",
}


def schema(detail_type: DetailType) -> dict[str, Any]:
    """The JSON Schema (draft 7) that the detail of an event of this type matches."""
    return _load(_SCHEMA_FILES[detail_type])


def directive_schema() -> dict[str, Any]:
    """The JSON Schema (draft 7) of `ResumeDirective`."""
    return _load("directive-v1.json")


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema (draft 7) of `CheckpointManifest`."""
    return _load("manifest-v1.json")


def _load(name: str) -> dict[str, Any]:
    text = resources.files("truestep.contract").joinpath("schemas", name).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """Detail of ``Training Checkpoint Written`` and ``Trusted``, sent by rank 0."""

    schema_version: int = EVENT_SCHEMA_VERSION
    run: RunRef
    checkpoint: CheckpointRef
    weights_fingerprint: str
    clean_through: Step | None = None
    at: str = ""


@dataclass(frozen=True, kw_only=True)
class ResumeEvent:
    """Detail of ``Training Resumed`` (after loading) and ``Training Verified`` (the first audit since has passed)."""

    schema_version: int = EVENT_SCHEMA_VERSION
    run: RunRef
    incident_id: str
    checkpoint: CheckpointRef
    step: Step
    """Resumed: the first step to be trained. Verified: the audit's step."""
    nodes: tuple[str, ...] = field(default_factory=tuple)
    """Names of the nodes in use, sorted, cut to 64."""
    at: str = ""
