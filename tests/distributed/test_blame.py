"""The right rank is named, by the right check, and nobody where the fault is everybody's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import scenarios
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed

SCHEDULE: dict[str, Any] = {"audit_every": 5, "check_every": 5}
OUTPUT_FLIP = {"site": "module_output", "target": "blocks.1.mlp.2", "element": 5, "bit": 20}


def alarm_of(results: list[dict[str, Any]]) -> Alarm:
    """The one alarm, after its JSON round trip."""
    document = same_everywhere(results, "alarm")
    assert document is not None, "no alarm was raised"
    return Alarm.from_json(document)


@pytest.mark.parametrize(("world_size", "faulty"), [(3, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("first_step", [0, 7])
def test_output_bit_flip_convicts_the_faulty_rank(
    run_ranks: RunRanks, world_size: int, faulty: int, first_step: int
) -> None:
    fault = {**OUTPUT_FLIP, "first_step": first_step}
    results = run_ranks(scenarios.faulty_run, world_size, faulty, fault, 15, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[faulty]["firings"] > 0
    assert (alarm.check, alarm.verdict.kind, alarm.suspect_ranks) == ("ring_replay", "conclusive", (faulty,))
    assert alarm.suspects[0].node_name == f"node-{faulty}"
    assert alarm.step == (4 if first_step == 0 else 9)
    assert alarm.clean_through == (None if first_step == 0 else 4)
    assert same_everywhere(results, "saved") == ([] if first_step == 0 else [4])


def test_fault_that_hits_only_the_audited_pass_need_not_recur(run_ranks: RunRanks) -> None:
    """The recorded step is wrong, every replay of it anywhere is right: the record is still the outlier."""
    fault = {**OUTPUT_FLIP, "first_step": 4, "last_step": 4, "passes": 1}
    results = run_ranks(scenarios.faulty_run, 4, 2, fault, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[2]["firings"] == 1
    assert (alarm.verdict.kind, alarm.suspect_ranks) == ("conclusive", (2,))


def test_fault_in_the_backward_is_seen_though_the_loss_is_right(run_ranks: RunRanks) -> None:
    fault = {"site": "gradient", "target": "blocks.0.mlp.0", "element": 3, "bit": 12}
    results = run_ranks(scenarios.faulty_run, 3, 1, fault, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[1]["firings"] > 0
    assert (alarm.verdict.kind, alarm.suspect_ranks) == ("conclusive", (1,))
    losses = [loss for edge in alarm.evidence["edges"] for loss in set(edge["losses"].values())]
    assert len(losses) == len(alarm.evidence["edges"]), "a backward fault must not change a loss"
    assert "blocks.0.mlp.0.weight" in alarm.evidence["edges"][0]["differing_gradient_names"]


def test_nan_of_one_rank_that_others_do_not_reproduce_convicts_it(run_ranks: RunRanks) -> None:
    fault = {"site": "module_output", "target": "blocks.0.mlp.0", "model": "nan", "first_step": 2}
    results = run_ranks(scenarios.faulty_run, 3, 1, fault, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[1]["firings"] > 0
    assert (alarm.check, alarm.step) == ("nonfinite", 2)
    assert (alarm.verdict.kind, alarm.suspect_ranks) == ("conclusive", (1,))


def test_nan_that_every_rank_reproduces_is_numerics_and_accuses_nobody(run_ranks: RunRanks) -> None:
    fault = {"site": "module_output", "target": "blocks.0.mlp.0", "model": "nan", "first_step": 2}
    results = run_ranks(scenarios.faulty_run, 3, None, fault, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert (alarm.check, alarm.verdict.kind, alarm.suspect_ranks) == ("nonfinite", "numerics", ())


def test_weight_flip_names_rank_tensor_element_and_bit(run_ranks: RunRanks) -> None:
    fault = {
        "site": "weight",
        "target": "blocks.1.mlp.0.weight",
        "element": 17,
        "bit": 9,
        "first_step": 4,
        "last_step": 4,
    }
    results = run_ranks(scenarios.faulty_run, 3, 2, fault, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[2]["firings"] == 1
    assert (alarm.check, alarm.step) == ("weights", 4)
    assert alarm.evidence["coverage"] == "loss and gradients"
    assert "`differences`" in alarm.evidence["bundle_missing"]
    assert (alarm.verdict.kind, alarm.suspect_ranks) == ("conclusive", (2,))
    (difference,) = alarm.evidence["differences"]
    assert (difference["rank"], difference["tensor"], difference["elements"]) == (2, "blocks.1.mlp.0.weight", 1)
    assert (difference["first"][0]["element"], difference["first"][0]["flipped_bits"]) == (17, [9])
    assert same_everywhere(results, "saved") == []


def test_optimizer_state_flip_is_found_before_anything_is_saved(run_ranks: RunRanks) -> None:
    """The weights are still equal when the checkpoint is due: only the optimizer comparison can see it."""
    fault = {
        "site": "optimizer_state",
        "target": "blocks.1.mlp.0.weight/exp_avg_sq",
        "element": 3,
        "bit": 0,
        "first_step": 4,
        "last_step": 4,
    }
    results = run_ranks(scenarios.faulty_run, 3, 1, fault, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[1]["firings"] == 1
    assert (alarm.check, alarm.verdict.kind, alarm.suspect_ranks) == ("optimizer_state", "conclusive", (1,))
    (difference,) = alarm.evidence["differences"]
    assert (difference["rank"], difference["tensor"]) == (1, "blocks.1.mlp.0.weight/exp_avg_sq")
    assert [(entry["element"], entry["flipped_bits"]) for entry in difference["first"]] == [(3, [0])]
    assert same_everywhere(results, "saved") == []


def test_two_nodes_detect_but_do_not_name(run_ranks: RunRanks) -> None:
    results = run_ranks(scenarios.faulty_run, 2, 1, OUTPUT_FLIP, 10, **SCHEDULE)

    alarm = alarm_of(results)
    assert results[1]["firings"] > 0
    assert (alarm.verdict.kind, alarm.suspect_ranks) == ("ambiguous", (0, 1))
    assert "3 nodes" in alarm.verdict.settle
