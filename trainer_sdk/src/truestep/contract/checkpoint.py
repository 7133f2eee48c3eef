"""What a checkpoint says about itself. Layout of a checkpoint in docs/architecture.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from truestep.contract.codec import sha256_hex
from truestep.contract.types import Step

MANIFEST_NAME = "manifest.json"
TRUSTED_NAME = "trusted.json"
REVOKED_NAME = "revoked.json"


TOMBSTONE_NAME = "tombstone.json"


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """Content of ``tombstone.json`` at the checkpoint root: an alarm ended the run; nobody starts before a directive
    says from which checkpoint."""

    schema_version: int = 1
    alarm_id: str
    step: Step
    run_id: str
    attempt_id: str
    at: str
    """When the alarm was detected, ISO 8601, UTC: every rank writes the same bytes."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """Names one checkpoint exactly: where it is, and the hash that its manifest must have."""

    uri: str
    """``s3://bucket/prefix/step-00000019`` or ``file:///fsx/run/step-00000019``; no trailing slash."""
    step: Step
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with forward slashes."""
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Written last, never changed: a checkpoint without one does not exist. Its SHA-256 is that of the file's bytes."""

    schema_version: int = 1
    run_id: str
    attempt_id: str
    step: Step
    world_size: int
    weights_fingerprint: str
    """``v1:`` + hex over all parameters and agreeing buffers, as `truestep.fingerprint` combines them."""
    tensor_fingerprints: Mapping[str, str] = field(default_factory=dict)
    optimizer_fingerprint: str = ""
    checks: Mapping[str, int] = field(default_factory=dict)
    """Check name -> newest step, at the time of writing, at which it had passed on every rank."""
    bucket_layout_sha256: str = ""
    """Hash of DDP's bucket layout: a resumed run whose layout differs sums in another order (docs/adr/0001)."""
    directive_sha256: str = ""
    """`directive_sha256` of the resume directive under which the saving attempt started, or empty. Such a checkpoint
    descends from the ordered one, so a restart under the same directive may use it although it is newer."""
    ordered: CheckpointRef | None = None
    """What that directive ordered; with a fallback the attempt started from an older one."""
    answers_alarm_ids: tuple[str, ...] = ()
    """Alarms that it answers: this checkpoint was trained after them."""
    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    created_at: str = ""
    """ISO 8601, UTC."""


@dataclass(frozen=True, kw_only=True)
class TrustMark:
    """Content of ``trusted.json`` beside a manifest: an audit passed on every rank at or after its step."""

    schema_version: int = 1
    manifest_sha256: str
    step: Step
    clean_through: Step
    assumed_hit_probability: float = 1.0
    """Hit probability p per step for which this trust holds, at `risk`; a rarer fault can slip past the audits."""
    risk: float = 0.0
    """Probability that a fault that hits a step with this p passed every audit since the checkpoint: (1 - p)^2 each."""
    promoted_at: str = ""
    sha256: str = ""
    """Of `canonical_bytes` of this mark with this field empty; filled in where it is empty. Raises `ValueError` for
    another one: one damaged digit must not change what is trusted."""

    def __post_init__(self) -> None:
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        expected = sha256_hex({**document, "sha256": ""})
        if self.sha256 not in ("", expected):
            raise ValueError("its SHA-256 is not that of its content: it was changed or damaged after it was written")
        object.__setattr__(self, "sha256", expected)


@dataclass(frozen=True, kw_only=True)
class RevocationMark:
    """Content of ``revoked.json``: an incident's suspect window covers this checkpoint. Permanent."""

    schema_version: int = 1
    manifest_sha256: str
    step: Step
    incident_id: str
    reason: str
    revoked_at: str = ""
