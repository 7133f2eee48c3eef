"""The seams inside the SDK: what the guard needs from whoever keeps checkpoints and whoever reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from truestep.contract import Alarm, CheckpointRef, Step


@dataclass(frozen=True, kw_only=True)
class SaveEvidence:
    """What the guard knows about the state that is about to be saved. The same on every rank."""

    step: Step
    weights_fingerprint: str
    tensor_fingerprints: Mapping[str, str]
    """What the ranks hold equally; not a buffer that follows each rank's own batches."""
    optimizer_fingerprint: str
    checks: Mapping[str, int]
    """Check name -> newest step at which it passed on every rank."""
    bucket_layout_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run starts, and why there."""

    start_step: Step
    """First step to be trained: 0, or checkpoint step + 1."""
    checkpoint: CheckpointRef | None = None
    incident_id: str = ""
    """Of the directive, also of one by hand; empty where none ordered this resume. Events carry an incident's alone."""
    directive_sha256: str = ""
    """`truestep.contract.directive_sha256` of the directive that did."""
    skipped: tuple[str, ...] = field(default_factory=tuple)
    """A sentence for every newer candidate that was refused."""


@runtime_checkable
class CheckpointStore(Protocol):
    """Keeps checkpoints that can be trusted. Every method is called by every rank, at the same step."""

    def save(self, evidence: SaveEvidence) -> CheckpointRef | None:
        """Write a checkpoint of the state after ``evidence.step``; its manifest last. None: it is still written."""

    def promote(self, clean_through: Step) -> CheckpointRef | None:
        """Mark every written checkpoint at or before `clean_through` trusted. Returns the newest trusted one."""

    @property
    def newest_trusted(self) -> CheckpointRef | None:
        """The newest trusted checkpoint that this run knows of; the same on every rank."""

    @property
    def root_uri(self) -> str:
        """URI below which the checkpoints lie."""


@runtime_checkable
class FinishingStore(CheckpointStore, Protocol):
    """A store that may still be writing when training ends."""

    def finish(self) -> None:
        """Return once everything is written. Called by every rank."""


class Reporter(Protocol):
    """Sends what happened to the recovery. Called on one rank; never raises, never loses an entry."""

    def alarm(self, alarm: Alarm) -> None:
        """Write the alarm to the outbox, then emit it."""

    def verified(self, resumed: ResumePoint, step: Step) -> None:
        """The first audit since the resume passed, at `step`."""

    def flush(self, timeout_seconds: float) -> bool:
        """Try to send what is in the outbox. True if it is empty afterwards."""
