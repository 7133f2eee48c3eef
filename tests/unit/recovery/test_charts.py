"""Pictures of GPU metrics: a gap is a gap, no data is said, a counter that is born with its first error shows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lambdas.domain.incident import Incident, open_incident, parse_iso
from lambdas.domain.metrics_comparison import TEMPERATURE
from lambdas.domain.records import Evidence
from lambdas.pages.charts import Chart, charts_of, draw
from tests.unit.recovery.alarms import NOW, an_alarm

ALARM = "2026-03-01T02:29:58Z"
GPU = "GPU-00000002"
ECC = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
ZERO = parse_iso(ALARM).timestamp()


def chart(kind: str) -> Chart:
    return Chart(name=f"0-{kind}", title="", gpu_uuid=GPU, uri="s3://bucket/incidents/i/dcgm.json")


def document(series: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """metric -> [(minutes after the alarm, value)]"""
    return {
        "alarm": ALARM,
        "start": "2026-03-01T01:29:58Z",
        "end": "2026-03-01T02:39:58Z",
        "step_seconds": 60,
        "series": [
            {
                "metric": {"__name__": name, "UUID": GPU},
                "values": [[ZERO + minutes * 60, str(value)] for minutes, value in points],
            }
            for name, points in series.items()
        ],
        "peer_temperatures": [],
    }


def lines(svg: str) -> list[str]:
    """The drawn paths of all series; a line with a gap has one path a piece."""
    return [path for path in re.findall(r'<path d="([^"]*)"', svg) if path.count(" L") + path.count(" ") > 1]


def with_items(**items: str) -> Incident:
    incident = open_incident(an_alarm(), now=NOW, dry_run=False)
    named = {name.replace("_", "-"): value for name, value in items.items()}
    return incident.evolve(evidence=Evidence(uri="s3://b/incidents/i/index.json", items=named))


def test_missing_samples_break_the_line() -> None:
    whole = [(float(minutes), 60.0 + minutes % 2) for minutes in range(-60, 10)]
    broken = [point for point in whole if not -40 < point[0] < -20]
    assert len(lines(draw(chart("temperature"), document({TEMPERATURE: broken})))) == 1 + len(
        lines(draw(chart("temperature"), document({TEMPERATURE: whole})))
    )


@pytest.mark.parametrize(("kind", "series"), [("temperature", {}), ("power", {TEMPERATURE: [(0, 60)]}), ("errors", {})])
def test_a_metric_without_samples_is_no_data(kind: str, series: dict[str, list[tuple[float, float]]]) -> None:
    svg = draw(chart(kind), document(series))
    assert "no data" in svg
    assert "this GPU" not in svg


def test_counters_that_did_not_move_are_not_drawn_and_it_is_said() -> None:
    svg = draw(chart("errors"), document({ECC: [(minutes, 7) for minutes in range(-60, 10)]}))
    assert "none moved" in svg
    assert "ECC_DBE_VOL_TOTAL" not in svg


def test_a_counter_that_is_born_with_its_first_error_is_drawn_though_it_never_rises() -> None:
    svg = draw(chart("errors"), document({ECC: [(minutes, 1) for minutes in range(2, 10)]}))
    assert "ECC_DBE_VOL_TOTAL" in svg
    assert "none moved" not in svg


def test_an_incident_has_three_pictures_a_gpu_or_the_reason_why_not() -> None:
    seen = charts_of(with_items(dcgm_a="s3://b/incidents/i/dcgm-a.json", dcgm_b="no data: timed out", log_x="s3://b/x"))
    assert [(one.name, one.missing) for one in seen] == [
        ("0-temperature", ""),
        ("0-power", ""),
        ("0-errors", ""),
        ("1", "no data: timed out"),
    ]


def test_the_same_evidence_gives_the_same_picture_and_no_script() -> None:
    one, two = (draw(chart("temperature"), document({TEMPERATURE: [(-1, 60), (1, 61)]})) for _ in range(2))
    assert one == two
    assert "<script" not in one
