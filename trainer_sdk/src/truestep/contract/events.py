"""Events between training and recovery: sources, detail types, and which schema a detail must match."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any, Final

from truestep.contract.alarm import RunRef
from truestep.contract.checkpoint import CheckpointRef
from truestep.contract.errors import ContractError
from truestep.contract.types import Step

SOURCE_TRAINING = "truestep.training"
"""What every source of training begins with; `training_source` has the whole of it."""
SOURCE_RECOVERY = "truestep.recovery"
EVENT_SCHEMA_VERSION = 1

_CLUSTER_ARN: Final = re.compile(r"arn:[a-z0-9-]+:sagemaker:[a-z0-9-]+:[0-9]{12}:cluster/([A-Za-z0-9-]{1,63})")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


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


def training_source(cluster_arn: str, namespace: str) -> str:
    """``truestep.training.<cluster id>.<namespace>``: the one EventBridge source that may speak for a run there.

    IAM allows a pod exactly this ``events:source``, and the recovery takes an event from no other. Neither part has a
    dot, so that two places never share a source; at most 145 characters of the 256 that EventBridge allows. Raises
    ContractError where one of the two is missing or malformed.
    """
    found = _CLUSTER_ARN.fullmatch(cluster_arn)
    if found is None:
        raise ContractError(
            f"{cluster_arn[:200]!r} is no HyperPod cluster's ARN: set TRUESTEP_CLUSTER_ARN in the training pods, as in "
            "arn:aws:sagemaker:us-west-2:111122223333:cluster/abc123def456"
        )
    if not _NAMESPACE.fullmatch(namespace):
        raise ContractError(
            f"{namespace[:200]!r} is no Kubernetes namespace: set POD_NAMESPACE in the training pods from the downward "
            "API (metadata.namespace)"
        )
    return f"{SOURCE_TRAINING}.{found[1]}.{namespace}"


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
    ordered: CheckpointRef | None = None
    """As in the manifest, which a recovery cannot read where it lies on a file system."""
    answers_alarm_ids: tuple[str, ...] = ()
    at: str = ""


@dataclass(frozen=True, kw_only=True)
class ResumeEvent:
    """Detail of ``Training Resumed`` (after loading) and ``Training Verified`` (the first audit since has passed)."""

    schema_version: int = EVENT_SCHEMA_VERSION
    run: RunRef
    incident_id: str
    directive_sha256: str = ""
    """Of the directive that ordered this resume (`truestep.contract.directive_sha256`); empty where none did."""
    checkpoint: CheckpointRef
    step: Step
    """Resumed: the first step to be trained. Verified: the audit's step."""
    nodes: tuple[str, ...] = field(default_factory=tuple)
    """Names of the nodes in use, sorted, cut to 64."""
    at: str = ""
