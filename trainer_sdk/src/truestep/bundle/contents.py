"""What a bundle holds, as documents. Standard library only.

TruestepError
└── BundleError   a bundle cannot be read or run again here; says what to do
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from truestep.contract import CheckpointRef, FileEntry, IdentityRow, Rank, RunRef, Step, TruestepError

BUNDLES = "bundles"
BUNDLE_NAME = "bundle.json"
INPUTS_NAME = "inputs.pt"
WEIGHTS_NAME = "weights.pt"
RECORDED_NAME = "recorded.json"


class BundleError(TruestepError):
    """A bundle cannot be read, or not be run again here. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """One module's output in the forward, or the gradient of it in the backward; in the order in which they came."""

    phase: str
    """``forward`` or ``backward``."""
    module: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class PartyResult:
    """What one rank computed for the failing micro-batch."""

    loss: str
    """Printed fingerprint; empty where it is not known."""
    loss_value: str
    gradients: Mapping[str, tuple[str, ...]]
    """Parameter -> fingerprint of each gradient that arrived at it, in order."""


@dataclass(frozen=True, kw_only=True)
class RecordedPass:
    """Content of ``recorded.json``."""

    results: Mapping[str, PartyResult]
    """Rank (in decimal) -> what it computed in the audit."""
    parameters: Mapping[str, str]
    """Parameter -> fingerprint before the update."""
    frozen: tuple[str, ...] = ()
    """Parameters that want no gradient."""
    evaluating: tuple[str, ...] = ()
    """Modules that were in evaluation mode."""
    trace: tuple[TraceEvent, ...] = ()
    """Of one more run on the writer that gave the writer's result again; empty where there was none."""
    trace_missing: str = ""
    """Why `trace` is empty."""


@dataclass(frozen=True, kw_only=True)
class WeightsPlace:
    """Where the weights are."""

    kind: str
    """``file`` (in the bundle), ``checkpoint`` (`checkpoint` holds the very same bits), or ``left_out``."""
    bytes: int
    checkpoint: CheckpointRef | None = None
    """For ``left_out``: the newest trusted one, whose weights are older."""
    reason: str = ""
    """Why they are left out."""


@dataclass(frozen=True, kw_only=True)
class BundleManifest:
    """Content of ``bundle.json``, written last."""

    schema_version: int = 1
    alarm_id: str
    run: RunRef
    step: Step
    producer: Rank
    """Whose micro-batch it is."""
    replayer: Rank
    """Whose replay contradicted the producer's record."""
    writer: IdentityRow
    suspects: tuple[IdentityRow, ...]
    reference: Rank | None
    """A rank whose result a majority of the parties share; None where nothing settled who was right."""
    compares_loss: bool
    compares_gradients: bool
    inputs_fingerprint: str
    weights: WeightsPlace
    model: str = ""
    """``module:function``; empty where the run did not say."""
    device_type: str
    versions: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, Any] = field(default_factory=dict)
    """Kernel modes during the audit, as `truestep.bundle.modes` reads and sets them."""
    files: tuple[FileEntry, ...] = ()
    created_at: str = ""
