"""GPU metrics around an alarm as SVG, made from the evidence that SnapshotEvidence kept.

A gap in the samples is a gap in the line: missing is not zero, and not clean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import pygal
from pygal.style import Style

from lambdas.domain.incident import Incident, parse_iso
from lambdas.domain.metrics_comparison import COUNTERS, TEMPERATURE, XID

_PREFIX: Final = "dcgm-"
_GAP_STEPS: Final = 2.5
"""Steps without a sample after which the line is broken; one lost scrape is no gap."""
_FONT: Final = "system-ui, sans-serif"
_DARK: Final = (
    "inline:@media (prefers-color-scheme: dark) { text { fill: #e6e6e6 !important; } "
    ".axis .line, .axis .guide.line, .axis .major.line { stroke: #8a8a8a !important; } }"
)

_LINES: Final = ("#d1495b", "#3a7ca5", "#5b8c5a", "#8f6bb3", "#777777")
_ALARM: Final = "#e08e0b"

Points = list[tuple[float, float | None]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture of the page. `name` is the last part of its address."""

    name: str
    title: str
    gpu_uuid: str
    uri: str
    """Where the evidence lies; empty where there is none."""
    missing: str = ""
    """``no data: <why>`` where there is no evidence to draw."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    title: str
    unit: str
    metrics: tuple[str, ...]
    increases: bool = False
    """Draw how much the value rose since the window's start, and leave out what did not."""


_KINDS: Final[Mapping[str, _Kind]] = {
    "temperature": _Kind(title="Temperature", unit="°C", metrics=(TEMPERATURE,)),
    "power": _Kind(title="Power", unit="W", metrics=("DCGM_FI_DEV_POWER_USAGE",)),
    "errors": _Kind(title="Error counters", unit="", metrics=(XID, *COUNTERS), increases=True),
}


def charts_of(incident: Incident) -> tuple[Chart, ...]:
    """The pictures of an incident: three a suspect GPU, or one that says why there is nothing to draw."""
    items = incident.evidence.items if incident.evidence else {}
    found: list[Chart] = []
    for index, name in enumerate(sorted(name for name in items if name.startswith(_PREFIX))):
        gpu, value = name.removeprefix(_PREFIX), items[name]
        if not value.startswith("s3://"):
            found.append(Chart(name=str(index), title="GPU metrics", gpu_uuid=gpu, uri="", missing=value))
            continue
        found += [
            Chart(name=f"{index}-{key}", title=kind.title, gpu_uuid=gpu, uri=value) for key, kind in _KINDS.items()
        ]
    return tuple(found)


def draw(chart: Chart, document: Mapping[str, Any]) -> str:
    """The SVG of a chart. `document` is the evidence that `chart.uri` names.

    The alarm is a dashed line. The temperature has the median of the node's other GPUs beside it. Raises KeyError,
    TypeError or ValueError for a document that SnapshotEvidence did not write.
    """
    kind = _KINDS[chart.name.partition("-")[2]]
    alarm, step = parse_iso(document["alarm"]).timestamp(), float(document["step_seconds"])
    start, end = ((parse_iso(document[name]).timestamp() - alarm) / 60 for name in ("start", "end"))
    lines: dict[str, Points] = {}
    for entry in document["series"]:
        metric = entry["metric"].get("__name__", "")
        if metric in kind.metrics:
            lines[_label(metric) if kind.increases else "this GPU"] = _points(entry["values"], alarm, step)
    lines = {label: points for label, points in lines.items() if points}
    nothing = "none moved" if kind.increases and lines else "no data"
    if kind.increases:
        rises = {label: _increases(label, points, start + _GAP_STEPS * step / 60) for label, points in lines.items()}
        lines = {label: points for label, points in rises.items() if any(y for _, y in points)}
    elif TEMPERATURE in kind.metrics:
        peers = [entry for entry in document["peer_temperatures"] if entry["metric"].get("UUID") != chart.gpu_uuid]
        if points := _median(peers, alarm, step):
            lines["median of the node's others"] = points
    return _svg(kind, lines, nothing, window=(start, max(end, 1.0)), identity=f"{chart.uri} {chart.name}")


def draw_unreadable(chart: Chart) -> str:
    """The SVG of a chart whose evidence cannot be read now."""
    kind = _KINDS[chart.name.partition("-")[2]]
    return _svg(kind, {}, "the evidence cannot be read now", window=(0, 1), identity=f"{chart.uri} {chart.name}")


def _svg(kind: _Kind, lines: Mapping[str, Points], nothing: str, *, window: tuple[float, float], identity: str) -> str:
    values = [y for points in lines.values() for _, y in points if y is not None]
    colours = [_LINES[index % len(_LINES)] for index in range(len(lines))]
    picture = pygal.XY(
        js=(),
        css=(*pygal.Config.css.value, _DARK),
        style=Style(
            background="transparent", plot_background="transparent", font_family=_FONT, label_font_size=14,
            major_label_font_size=14, legend_font_size=13, no_data_font_size=16, stroke_opacity="1",
            foreground="#333", foreground_strong="#111", foreground_subtle="#666", guide_stroke_color="#8886",
            major_guide_stroke_color="#8886", guide_stroke_dasharray="none", colors=(*colours, _ALARM),
        ),
        width=420, height=290 if values else 48, disable_xml_declaration=True, show_dots=False, show_x_guides=False,
        show_x_labels=bool(values), show_y_labels=bool(values), show_y_guides=bool(values),
        legend_at_bottom=True, legend_at_bottom_columns=1, truncate_legend=-1, max_scale=6,
        no_data_text=nothing,
        x_value_formatter=lambda minutes: f"{minutes:g} min",
        value_formatter=lambda value: f"{value:g} {kind.unit}".strip(),
    )  # fmt: skip
    picture.add_xml_filter(_without_scripts)
    # The same evidence gives the same picture; pygal's own id is random.
    picture.uuid = hashlib.sha256(identity.encode()).hexdigest()[:12]
    for label, points in lines.items():
        picture.add(label, points, stroke_style={"width": 2}, allow_interruptions=True)
    if values:
        picture.xrange = window
        picture.x_labels = [minutes for minutes in range(-60, 11, 20) if window[0] <= minutes <= window[1]]
        low, high = min(values), max(values)
        pad = (high - low) * 0.05 or 1.0
        picture.add("alarm", [(0, low - pad), (0, high + pad)], stroke_style={"width": 3, "dasharray": "6, 4"})
    return str(picture.render(is_unicode=True))


def _without_scripts(root: Any) -> Any:
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag == "script"]:
            parent.remove(child)
    return root


def _points(values: Sequence[Sequence[Any]], alarm: float, step: float) -> Points:
    """(minutes after the alarm, value), with an empty point where samples are missing."""
    points: Points = []
    earlier = None
    for at, value in sorted((float(at), float(value)) for at, value in values):
        if earlier is not None and at - earlier > _GAP_STEPS * step:
            points.append(((earlier + at) / 2 / 60 - alarm / 60, None))
        points.append(((at - alarm) / 60, value))
        earlier = at
    return points


def _increases(label: str, points: Points, late: float) -> Points:
    """Rise since the window's start. A counter that is born later than `late` is born with its first error, and the
    XID is the code of the last error, not a count: both are drawn from zero.
    """
    begin, first = points[0]
    base = 0.0 if first is None or begin > late or label == _label(XID) else first
    return [(x, None if y is None else y - base) for x, y in points]


def _median(entries: Sequence[Mapping[str, Any]], alarm: float, step: float) -> Points:
    """The median over the series at every time that has a sample of any."""
    by_time: dict[float, list[float]] = {}
    for entry in entries:
        for at, value in entry["values"]:
            by_time.setdefault(float(at), []).append(float(value))
    return _points([(at, median(values)) for at, values in by_time.items()], alarm, step)


def _label(metric: str) -> str:
    """``DCGM_FI_DEV_ECC_DBE_VOL_TOTAL`` -> ``ECC_DBE_VOL_TOTAL``."""
    return metric.removeprefix("DCGM_FI_DEV_")
