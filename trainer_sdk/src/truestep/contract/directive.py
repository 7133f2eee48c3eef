"""The order to resume: exactly which checkpoint, and nothing newer."""

from __future__ import annotations

from dataclasses import dataclass

from truestep.contract.checkpoint import CheckpointRef
from truestep.contract.codec import sha256_hex
from truestep.contract.types import Step


@dataclass(frozen=True, kw_only=True)
class ResumeDirective:
    """Written by the recovery into the ConfigMap ``truestep-resume-<job>``, key ``resume.json``; read at each start."""

    schema_version: int = 1
    incident_id: str
    checkpoint_uri: str
    manifest_sha256: str
    max_step: Step
    """Highest checkpoint step allowed: with a fallback, only older ones."""
    banned_gpu_uuids: tuple[str, ...] = ()
    """The same hardware can come back under a new instance id: `attach` refuses these."""
    answers_alarm_ids: tuple[str, ...] = ()
    """Alarms after which it lets training start: a tombstone of any other still refuses the start. What it answers is
    said, never concluded from times: the trainer's clock and the recovery's differ."""
    issued_at: str = ""


def ordered_checkpoint(directive: ResumeDirective) -> CheckpointRef:
    """The checkpoint that the directive orders."""
    return CheckpointRef(
        uri=directive.checkpoint_uri, step=directive.max_step, manifest_sha256=directive.manifest_sha256
    )


def directive_sha256(directive: ResumeDirective) -> str:
    """What `CheckpointManifest.directive_sha256` holds; a directive issued again for the same incident has another."""
    return sha256_hex(directive)
