"""What the recovery's confirmation reports from a node: small enough for a pod's termination message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from truestep.contract.codec import canonical_bytes

REPORT_BYTES = 4096
"""What Kubernetes keeps of a container's termination message; what is longer is cut off in the middle."""
_LENGTHS = ((240, 96), (120, 64), (60, 0), (0, 0))
"""Characters kept of a sentence and of a module's name: the first pair with which a report fits."""


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """What repeating the bundle's computation on one GPU showed."""

    device: str
    """``cuda:3`` or ``cpu``."""
    gpu_uuid: str = ""
    runs: int = 0
    differing: int = 0
    """Of `runs`, with another result than the reference."""
    as_recorded: int = 0
    """Of `differing`, with exactly the wrong result that a rank computed in the audit."""
    gave: Mapping[str, int] = field(default_factory=dict)
    """Rank -> runs that gave what this rank recorded in the audit; the lowest of ranks that recorded the same."""
    first: str = ""
    """Where most of the differing runs first went wrong, for example ``forward blocks.1.expand``."""
    weights_differ: bool = False
    """The device does not hold what was copied to it."""
    problem: str = ""
    """Why it was not run, or ended early; empty where all runs ended."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one confirmation showed on all GPUs of a node."""

    schema_version: int = 1
    alarm_id: str = ""
    """The bundle's alarm; empty where the bundle could not be read."""
    settled: bool = False
    """Whether a majority of ranks had computed the reference in the audit. Otherwise each device is held against the
    rank's result that it gives most often, so only `DeviceReport.gave` can be compared between nodes."""
    devices: tuple[DeviceReport, ...] = ()
    problem: str = ""
    """Why nothing was run at all."""


def report_bytes(report: NodeReport) -> bytes:
    """The report as JSON of at most `REPORT_BYTES`; sentences are shortened first, counts never.

    Raises ValueError where not even the counts fit, which takes more than 16 devices.
    """
    for sentence, name in _LENGTHS:
        content = canonical_bytes(_shortened(report, sentence, name))
        if len(content) <= REPORT_BYTES:
            return content
    raise ValueError(f"a report of {len(report.devices)} devices does not fit into {REPORT_BYTES} bytes")


def _shortened(report: NodeReport, sentence: int, name: int) -> NodeReport:
    devices = tuple(
        replace(device, problem=_cut(device.problem, sentence), first=_cut(device.first, name))
        for device in report.devices
    )
    return replace(report, devices=devices, problem=_cut(report.problem, max(sentence, 60) * 4))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(0, length - 1)] + "…" * bool(length)
