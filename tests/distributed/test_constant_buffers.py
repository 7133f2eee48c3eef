"""A flip in one rank's constant buffers is found before DDP's copy hides it, and no program that writes is accused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import constant_buffer_runs
from tests.distributed.conftest import RunRanks, same_everywhere
from tests.distributed.constant_buffer_runs import AT, FLIPS, STEPS, WRITES
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed

ALL = ["count", "mask", "order", "scale", "temperature"]


def test_a_flip_on_any_rank_is_named_with_its_bit_and_no_way_of_writing_is(run_ranks: RunRanks) -> None:
    results = run_ranks(constant_buffer_runs.runs, 3)

    for name, (faulty, _) in FLIPS.items():
        rows = [row[name] for row in results]
        assert [row["struck"] for row in rows] == [rank == faulty for rank in range(3)], name
        _assert_named(rows, faulty, AT, name)
    first = Alarm.from_json(same_everywhere([row["float, rank 0"] for row in results], "alarm"))
    difference = first.evidence["differences"][0]
    assert (difference["rank"], difference["tensor"], difference["elements"]) == (0, "scale", 1)
    assert [difference["first"][0][key] for key in ("element", "flipped_bits")] == [3, [27]]
    before, after = (int(difference["first"][0][key], 16) for key in ("reference_bits", "bits"))
    assert (before ^ after) == 1 << 27
    assert "bit 27 of element 3 of scale flipped on rank 0" in first.verdict.reason
    elsewhere = Alarm.from_json(same_everywhere([row["float, rank 1"] for row in results], "alarm"))
    assert elsewhere.evidence["differences"] == [{**difference, "rank": 1}], "though DDP has undone it by then"

    behind = [row["behind the forward"] for row in results]
    assert [row["struck"] for row in behind] == [True, False, False]
    _assert_named(behind, 0, AT + 1, "behind the forward of the step before")

    for name in (*(f"written: {name}" for name in WRITES), "own statistics", "early"):
        rows = [row[name] for row in results]
        assert [row["alarm"] for row in rows] == [None] * 3, name
        assert [row["steps"] for row in rows] == [STEPS] * 3, name
        assert any(row["struck"] for row in rows) == (name not in ("written: nothing", "own statistics")), name
    assert same_everywhere([row["written: nothing"] for row in results], "watched") == ALL
    assert same_everywhere([row["written: data, all ranks alike"] for row in results], "watched") == ALL
    assert same_everywhere([row["own statistics"] for row in results], "watched") == ALL, "nor mean and variance"
    for name in ("of PyTorch, one bit", "data, one element", "NumPy", "a load", "data, an average on each rank"):
        watched = same_everywhere([row[f"written: {name}"] for row in results], "watched")
        assert watched == [other for other in ALL if other != "scale"], name


def test_of_two_nodes_both_stay_suspects_and_the_reason_says_whose_memory_changed(run_ranks: RunRanks) -> None:
    alarm = Alarm.from_json(same_everywhere(run_ranks(constant_buffer_runs.flipped_among_two, 2), "alarm"))
    assert (alarm.verdict.kind, alarm.suspect_ranks, alarm.step) == ("ambiguous", (0, 1), AT)
    assert "bit 27 of element 3 of scale flipped on rank 0" in alarm.verdict.reason
    assert (alarm.evidence["reference_rank"], alarm.evidence["differing_tensors"]) == (1, {"0": 1})


def test_a_flip_in_front_of_any_of_ddps_copies_is_named(run_ranks: RunRanks) -> None:
    results = run_ranks(constant_buffer_runs.flipped_in_front_of_other_copies, 3)
    for name in results[0]:
        rows = [row[name] for row in results]
        if name.startswith("written"):
            assert [(row["alarm"], row["steps"]) for row in rows] == [(None, STEPS)] * 3, name
        else:
            _assert_named(rows, 0, AT, name)


def _assert_named(rows: list[dict[str, Any]], rank: int, step: int, name: str) -> None:
    alarm = Alarm.from_json(same_everywhere(rows, "alarm"))
    assert (alarm.check, alarm.step, alarm.suspect_ranks) == ("weights", step, (rank,)), name
    assert (alarm.verdict.kind, alarm.verdict.cause) == ("conclusive", "open"), name
    assert [row["steps"] for row in rows] == [step] * 3, f"{name}: the update is dropped"
