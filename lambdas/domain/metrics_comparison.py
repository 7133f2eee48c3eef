"""GPU metrics before and after an alarm: what moved, and how much of the time was covered at all. Pure.

"No data" and "clean" are different answers, so every comparison carries how many samples it had of how many it should
have had, and nothing here ever says "clean": quiet counters do not acquit a GPU that computes wrong silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from statistics import median
from typing import Any

from truestep.contract.words import counted

TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
XID = "DCGM_FI_DEV_XID_ERRORS"
COUNTERS = (
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "DCGM_FI_DEV_POWER_VIOLATION",
    "DCGM_FI_DEV_THERMAL_VIOLATION",
)
GAUGES = (
    TEMPERATURE,
    "DCGM_FI_DEV_MEMORY_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
)
METRICS = (XID, *COUNTERS, *GAUGES)
HOTTER_KELVIN = 8.0
"""Temperature above the median of the node's other GPUs that is worth a sentence; they usually agree within 5 K."""


class Reading(StrEnum):
    """What a comparison of the two windows shows."""

    NO_DATA = "no data"
    """No sample in the window after the alarm."""
    APPEARED = "appeared"
    """No sample before, a non-zero one after: some series exist only from the first error on."""
    ROSE = "rose"
    SAME = "same"
    FELL = "fell"


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window of one series."""

    samples: int
    expected: int
    """Samples that a series without gaps has."""
    maximum: float | None
    """None without a sample."""


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric of one GPU, before and after."""

    metric: str
    gpu_uuid: str
    before: Window
    after: Window
    reading: Reading


def compare(
    series: Iterable[Mapping[str, Any]],
    *,
    gpu_uuid: str,
    start: datetime,
    pivot: datetime,
    end: datetime,
    step_seconds: int,
    metrics: Sequence[str] = METRICS,
) -> tuple[MetricComparison, ...]:
    """Compare every metric of one GPU on both sides of `pivot`, the alarm's time.

    series: a Prometheus matrix, ``{"metric": {"__name__", "UUID", ...}, "values": [[epoch seconds, "value"], ...]}``.
    Maxima are compared, not increases: XID is a gauge of the last error, and a counter that is born with its first
    error shows no increase. A metric without any series is there as "no data".
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in series:
        if entry["metric"].get("UUID") == gpu_uuid:
            points = [(float(at), float(value)) for at, value in entry["values"]]
            found.setdefault(entry["metric"].get("__name__", ""), []).extend(
                point for point in points if math.isfinite(point[1])
            )
    cut, lower, upper = pivot.timestamp(), start.timestamp(), end.timestamp()
    comparisons = []
    for metric in metrics:
        samples = found.get(metric, [])
        before = _window([value for at, value in samples if lower <= at < cut], cut - lower, step_seconds)
        after = _window([value for at, value in samples if cut <= at <= upper], upper - cut, step_seconds)
        comparisons.append(
            MetricComparison(
                metric=metric, gpu_uuid=gpu_uuid, before=before, after=after, reading=_reading(before, after)
            )
        )
    return tuple(comparisons)


def hotter_than_peers(series: Iterable[Mapping[str, Any]], *, gpu_uuid: str, pivot: datetime) -> float | None:
    """Kelvin by which the GPU's mean temperature from `pivot` on exceeds its peers' median; None without both."""
    means: dict[str, float] = {}
    for entry in series:
        if entry["metric"].get("__name__") != TEMPERATURE:
            continue
        values = [float(value) for at, value in entry["values"] if float(at) >= pivot.timestamp()]
        if values:
            means[entry["metric"].get("UUID", "")] = sum(values) / len(values)
    peers = [mean for uuid, mean in means.items() if uuid != gpu_uuid]
    if gpu_uuid not in means or not peers:
        return None
    return means[gpu_uuid] - median(peers)


def findings(comparisons: Sequence[MetricComparison], *, hotter_by: float | None) -> tuple[str, ...]:
    """Sentences for the person who decides: what moved, and in any case how much was covered."""
    if not comparisons:
        return ()
    gpu = comparisons[0].gpu_uuid
    covered = [entry for entry in comparisons if entry.reading is not Reading.NO_DATA]
    if not covered:
        return (
            f"{gpu}: no data for any of {counted(len(comparisons), 'GPU metric')}; that says nothing about the GPU",
        )
    sentences = [
        f"{gpu}: {entry.metric} {entry.reading}: {_shown(entry.before)} before, {_shown(entry.after)} after the alarm"
        for entry in covered
        if entry.metric not in GAUGES and entry.reading in (Reading.ROSE, Reading.APPEARED)
    ]
    if hotter_by is not None and hotter_by >= HOTTER_KELVIN:
        sentences.append(f"{gpu}: {hotter_by:.0f} K hotter than the median of the node's other GPUs")
    errors = [entry for entry in covered if entry.metric not in GAUGES]
    if not sentences:
        sentences.append(
            f"{gpu}: {counted(len(errors), 'error counter')} with data, none moved, which does not acquit the GPU"
        )
    missing = len(comparisons) - len(covered)
    if missing:
        sentences.append(f"{gpu}: no data for {missing} of {counted(len(comparisons), 'GPU metric')}")
    return tuple(sentences)


def _window(values: list[float], seconds: float, step_seconds: int) -> Window:
    expected = max(1, int(seconds // step_seconds))
    return Window(samples=len(values), expected=expected, maximum=max(values, default=None))


def _reading(before: Window, after: Window) -> Reading:
    if after.maximum is None:
        return Reading.NO_DATA
    if before.maximum is None:
        return Reading.APPEARED if after.maximum > 0 else Reading.SAME
    if after.maximum == before.maximum:
        return Reading.SAME
    return Reading.ROSE if after.maximum > before.maximum else Reading.FELL


def _shown(window: Window) -> str:
    return "no data" if window.maximum is None else f"{window.maximum:g}"
