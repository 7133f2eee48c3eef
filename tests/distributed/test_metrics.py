"""Counters of the checks, in the libraries that people plot with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import metrics_runs
from tests.distributed.conftest import RunRanks, same_everywhere

pytestmark = pytest.mark.distributed


def test_the_counters_reach_the_users_plots_and_a_writer_that_fails_stops_nothing(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    results = run_ranks(metrics_runs.plotted_run, 3, str(tmp_path))
    assert same_everywhere(results, "alarm") == [11, [1]]
    assert same_everywhere(results, "steps") == 11
    calls = results[0]["calls"]
    assert [step for step, _ in calls] == [3, 7, 11], "where more than the checks of every step ran, and on the alarm"
    counted = [
        {name.removeprefix("truestep/"): value for name, value in values.items() if not name.endswith("_seconds")}
        for _, values in calls
    ]
    assert counted[1] == {
        "nonfinite_passed": 8, "reduction_passed": 8, "ring_replay_passed": 2, "weights_passed": 2,
        "update_replay_passed": 2, "clean_through": 7, "alarms": 0,
    }  # fmt: skip
    assert counted[2] == counted[1] | {"nonfinite_passed": 11, "reduction_passed": 11, "alarms": 1}
    spent = [(values["truestep/audit_seconds"], values["truestep/check_seconds"]) for _, values in calls]
    assert all(0 < audit < checks for audit, checks in spent)
    assert spent[0][1] < spent[1][1] < spent[2][1]

    plotted = results[0]["tensorboard"]
    assert plotted.keys() == calls[0][1].keys()
    assert plotted["truestep/alarms"] == [[3, 0], [7, 0], [11, 1]]
    assert plotted["truestep/clean_through"] == [[3, 3], [7, 7], [11, 7]]
    assert results[0]["opentelemetry"] == calls[-1][1]
    assert [len(result["said"]) for result in results] == [0, 1, 0], "once, and only where it failed"
    assert "training goes on" in results[1]["said"][0]
