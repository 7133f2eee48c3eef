"""The bundle of a real alarm repeats the computation elsewhere, and shows the fault where the fault is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import bundle_scenarios
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.bundle.confirming import Confirmation, confirm, load_factory
from truestep.bundle.reading import Bundle, open_bundle
from truestep.contract import Alarm
from truestep.inject import FAULT_VARIABLE

pytestmark = pytest.mark.distributed

OUTPUT_FLIP: dict[str, Any] = {"site": "module_output", "target": "blocks.1.mlp.2", "element": 5, "bit": 20}


def alarm_of(results: list[dict[str, Any]]) -> Alarm:
    return Alarm.from_json(same_everywhere(results, "alarm"))


def confirmed(bundle: Bundle, repeat: int) -> Confirmation:
    return confirm(bundle, *load_factory(bundle.manifest.model), torch.device("cpu"), repeat=repeat)


def test_the_bundle_shows_the_fault_on_the_faulty_node_and_nothing_on_a_healthy_one(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_ranks(bundle_scenarios.bundled_run, 4, 2, OUTPUT_FLIP, tmp_path.as_uri())

    alarm = alarm_of(results)
    assert alarm.suspect_ranks == (2,)
    bundle = open_bundle(alarm.evidence["bundle_uri"])
    assert (bundle.manifest.producer, bundle.manifest.writer.rank) == (2, 0)
    assert bundle.manifest.alarm_id == alarm.alarm_id
    assert [row.rank for row in bundle.manifest.suspects] == [2]
    assert bundle.recorded.trace

    healthy = confirmed(bundle, 5)
    assert (healthy.runs, healthy.differing, healthy.settled) == (5, 0, True)

    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(OUTPUT_FLIP))
    always = confirmed(bundle, 5)
    assert (always.differing, always.hit_rate) == (5, 1.0)
    assert always.as_recorded == 5, "the faulty node must give again, bit for bit, what it gave in training"
    assert always.first_modules == {"forward blocks.1.mlp.2": 5}
    assert "blocks.1.mlp.0.weight" in always.parameters

    monkeypatch.setenv(FAULT_VARIABLE, json.dumps({**OUTPUT_FLIP, "probability": 0.3, "seed": 4}))
    rare = confirmed(bundle, 50)
    assert 0 < rare.differing < 50
    assert rare.hit_rate_low < 0.3 < rare.hit_rate_high
    assert rare.as_recorded == rare.differing


def test_a_fault_that_hit_once_is_bundled_with_the_right_reference(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The suspect's later runs are right: the bundle compares with the witnesses, not with the record."""
    fault = {**OUTPUT_FLIP, "first_step": 2, "last_step": 2, "passes": 1}
    alarm = alarm_of(run_ranks(bundle_scenarios.bundled_run, 3, 0, fault, tmp_path.as_uri()))
    bundle = open_bundle(alarm.evidence["bundle_uri"])
    assert (bundle.manifest.producer, bundle.manifest.step) == (0, 2)
    assert bundle.manifest.writer.rank == 1
    assert confirmed(bundle, 3).differing == 0


def test_a_nan_that_other_nodes_do_not_have_is_bundled_and_shown_again_by_the_faulty_node_alone(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {**OUTPUT_FLIP, "model": "nan", "first_step": 1}
    alarm = alarm_of(run_ranks(bundle_scenarios.bundled_run, 3, 1, fault, tmp_path.as_uri()))
    assert (alarm.check, alarm.step, alarm.suspect_ranks) == ("nonfinite", 1, (1,))
    bundle = open_bundle(alarm.evidence["bundle_uri"])
    assert (bundle.manifest.producer, bundle.manifest.writer.rank) == (1, 0)
    assert sorted(bundle.recorded.results) == ["0", "2"], "the convicted rank's own result is not known"

    healthy = confirmed(bundle, 3)
    assert (healthy.differing, healthy.settled) == (0, True)
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(fault))
    faulty = confirmed(bundle, 3)
    assert (faulty.differing, faulty.first_modules) == (3, {"forward blocks.1.mlp.2": 3})


def test_a_storage_that_hangs_or_refuses_never_costs_the_alarm(run_ranks: RunRanks, tmp_path: Path) -> None:
    results = run_ranks(bundle_scenarios.bundled_run, 3, 1, OUTPUT_FLIP, tmp_path.as_uri(), hangs=True, timeout=0.5)
    alarm = alarm_of(results)
    assert alarm.suspect_ranks == (1,)
    assert "not written within 0.5 s" in alarm.evidence["bundle_failed"]
    assert "bundle_uri" not in alarm.evidence
    assert alarm.evidence["bundle_expected"] == f"{tmp_path.as_uri()}/bundles/{alarm.alarm_id}"
    assert max(result["outbox"] for result in results) == 1

    (tmp_path / "file").write_text("in the way")
    results = run_ranks(bundle_scenarios.bundled_run, 3, 1, OUTPUT_FLIP, f"{tmp_path.as_uri()}/file/below")
    alarm = alarm_of(results)
    assert "StorageError" in alarm.evidence["bundle_failed"]
    assert alarm.evidence["bundle_expected"] == ""
    assert max(result["outbox"] for result in results) == 1
