"""GPU metrics before and after an alarm: "no data" is never the same as "nothing happened"."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from lambdas.domain.metrics_comparison import METRICS, TEMPERATURE, XID, Reading, compare, findings, hotter_than_peers

GPU = "GPU-aaaa"
PIVOT = datetime(2026, 1, 1, 12, tzinfo=UTC)
START, END = PIVOT - timedelta(minutes=10), PIVOT + timedelta(minutes=5)
ECC = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"


def series(name: str, values: dict[int, float | str], uuid: str = GPU) -> dict[str, Any]:
    """values: minutes relative to the alarm -> value."""
    points = [[(PIVOT + timedelta(minutes=at)).timestamp(), str(value)] for at, value in sorted(values.items())]
    return {"metric": {"__name__": name, "UUID": uuid}, "values": points}


def readings(*entries: dict[str, Any]) -> dict[str, Reading]:
    compared = compare(entries, gpu_uuid=GPU, start=START, pivot=PIVOT, end=END, step_seconds=60)
    assert [entry.metric for entry in compared] == list(METRICS)
    return {entry.metric: entry.reading for entry in compared}


def test_a_counter_that_is_born_with_its_first_error_has_appeared() -> None:
    assert readings(series(ECC, {1: 3}))[ECC] is Reading.APPEARED


def test_an_error_gauge_is_compared_by_its_maximum() -> None:
    assert readings(series(XID, {-5: 0, 1: 0, 2: 79, 3: 0}))[XID] is Reading.ROSE


def test_equal_maxima_are_the_same_and_a_gauge_may_fall() -> None:
    assert readings(series(ECC, {-5: 2, 1: 2}))[ECC] is Reading.SAME
    assert readings(series(TEMPERATURE, {-5: 70, 1: 60}))[TEMPERATURE] is Reading.FELL


def test_a_metric_without_samples_after_the_alarm_has_no_data() -> None:
    assert readings(series(ECC, {-5: 2}))[ECC] is Reading.NO_DATA
    assert set(readings().values()) == {Reading.NO_DATA}


def test_other_gpus_and_values_that_are_no_numbers_do_not_count() -> None:
    seen = readings(series(ECC, {-5: 0, 1: 9}, uuid="GPU-bbbb"), series(XID, {1: "NaN"}))
    assert seen[ECC] is Reading.NO_DATA
    assert seen[XID] is Reading.NO_DATA


def test_coverage_tells_how_many_samples_there_should_have_been() -> None:
    compared = compare(
        [series(ECC, {-5: 0, -4: 0, 1: 0})], gpu_uuid=GPU, start=START, pivot=PIVOT, end=END, step_seconds=60
    )
    ecc = next(entry for entry in compared if entry.metric == ECC)
    assert (ecc.before.samples, ecc.before.expected, ecc.after.samples, ecc.after.expected) == (2, 10, 1, 5)


def test_the_gpu_is_compared_with_the_median_of_its_nodes_others() -> None:
    entries = [series(TEMPERATURE, {1: 80})]
    entries += [series(TEMPERATURE, {1: value}, uuid=f"GPU-{value}") for value in (60, 62, 90)]
    assert hotter_than_peers(entries, gpu_uuid=GPU, pivot=PIVOT) == 18
    assert hotter_than_peers(entries[:1], gpu_uuid=GPU, pivot=PIVOT) is None
    assert hotter_than_peers(entries[1:], gpu_uuid=GPU, pivot=PIVOT) is None


def sentences(*entries: dict[str, Any], hotter_by: float | None = None) -> str:
    compared = compare(entries, gpu_uuid=GPU, start=START, pivot=PIVOT, end=END, step_seconds=60)
    return "\n".join(findings(compared, hotter_by=hotter_by))


def test_findings_name_what_moved() -> None:
    text = sentences(series(ECC, {-5: 1, 1: 4}), hotter_by=14.2)
    assert f"{ECC} rose: 1 before, 4 after" in text
    assert "14 K hotter" in text
    assert f"no data for {len(METRICS) - 1} of {len(METRICS)}" in text


def test_findings_never_acquit_a_quiet_gpu() -> None:
    text = sentences(series(ECC, {-5: 1, 1: 1}))
    assert "does not acquit" in text
    assert "clean" not in text
    assert "says nothing about the GPU" in sentences()
