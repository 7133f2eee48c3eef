"""What the recovery's confirmation reports from a node: small enough for a pod's termination message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from truestep.contract.codec import canonical_bytes, from_json
from truestep.contract.errors import ContractError

REPORT_BYTES = 4096
"""What Kubernetes keeps of a container's termination message; what is longer is cut off in the middle."""
_LENGTHS = ((240, 96), (120, 64), (60, 0), (0, 0))
"""Characters kept of a sentence and of a module's name: the first pair with which a report fits."""
MOST_RUNS: Final = 100_000_000
"""Of one device. A confirmation ends within a day at most, and no computation worth repeating takes less than 1 ms."""
_LONGEST: Final = {"device": 64, "gpu_uuid": 128, "first": 96, "problem": 240}
"""Characters of a device's texts in a report; `report_bytes` keeps to it."""
_Z_95: Final = 1.959963984540054
"""Standard normal quantile of 0.975."""


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


def read_report(document: Any) -> NodeReport:
    """The report in a JSON document that a pod wrote, which is not to be trusted: all that is counted is in range.

    Raises `ContractError` naming the first field that is not as `report_bytes` writes it.
    """
    report = from_json(NodeReport, document)
    try:
        canonical_bytes(report)
    except UnicodeEncodeError:
        raise ContractError("$: a text of it is not Unicode") from None
    _bounded("$.problem", report.problem, 4 * _LONGEST["problem"])
    for index, device in enumerate(report.devices):
        path = f"$.devices[{index}]"
        for name, longest in _LONGEST.items():
            _bounded(f"{path}.{name}", getattr(device, name), longest)
        _count(f"{path}.runs", device.runs, MOST_RUNS, "the most that can be")
        _count(f"{path}.differing", device.differing, device.runs, "its runs")
        _count(f"{path}.as_recorded", device.as_recorded, device.differing, "its differing runs")
        for runs in device.gave.values():
            _count(f"{path}.gave", runs, device.runs, "its runs")
        _count(f"{path}.gave in all", sum(device.gave.values()), device.runs, "its runs")
    return report


def wilson_interval(hits: int, runs: int) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927); (0, 1) without a run."""
    if runs == 0:
        return 0.0, 1.0
    share, z2 = hits / runs, _Z_95**2
    centre = (share + z2 / (2 * runs)) / (1 + z2 / runs)
    half = _Z_95 / (1 + z2 / runs) * math.sqrt(share * (1 - share) / runs + z2 / (4 * runs**2))
    # Exact at the ends, where rounding would leave 1e-19 of a hit that was never seen.
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == runs else centre + half)


def _bounded(path: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise ContractError(f"{path}: has {len(text)} characters, of {longest} that are allowed")


def _count(path: str, value: int, most: int, of: str) -> None:
    # Not the value itself: it may have thousands of digits.
    if not 0 <= value <= most:
        raise ContractError(f"{path}: {'is negative' if value < 0 else f'is more than {of} ({most:,})'}")


def _shortened(report: NodeReport, sentence: int, name: int) -> NodeReport:
    devices = tuple(
        replace(device, problem=_cut(device.problem, sentence), first=_cut(device.first, name))
        for device in report.devices
    )
    return replace(report, devices=devices, problem=_cut(report.problem, max(sentence, 60) * 4))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(0, length - 1)] + "…" * bool(length)
