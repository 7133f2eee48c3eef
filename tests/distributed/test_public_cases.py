"""Cases that users reported on public trackers of other tools, and how they end here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import public_cases
from tests.distributed.conftest import RunRanks, same_everywhere
from tests.distributed.public_cases import FAULTY
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed

_results: list[dict[str, Any]] = []


@pytest.fixture
def results(run_ranks: RunRanks) -> list[dict[str, Any]]:
    """All cases on three ranks, run once for all tests."""
    if not _results:
        _results.extend(run_ranks(public_cases.all_cases, 3))
    return _results


class Ended:
    """One case, which every rank saw alike."""

    def __init__(self, results: list[dict[str, Any]], case: Callable[[int], Any]) -> None:
        self._results = [result[case.__name__] for result in results]

    def __getitem__(self, key: str) -> Any:
        return same_everywhere(self._results, key)

    def on_each_rank(self, key: str) -> list[Any]:
        """What may differ between ranks."""
        return [result[key] for result in self._results]

    @property
    def alarm(self) -> Alarm:
        """The one alarm."""
        assert self["alarm"] is not None, "no alarm was raised"
        return Alarm.from_json(self["alarm"])

    @property
    def verdict(self) -> tuple[str, int, str, tuple[int, ...]]:
        """Check, step, kind of verdict, suspects."""
        alarm = self.alarm
        return str(alarm.check), alarm.step, str(alarm.verdict.kind), alarm.suspect_ranks


def test_a_restart_on_the_same_bad_gpu_is_refused_and_does_not_loop(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.restart_on_the_bad_gpu)
    assert ended.verdict == ("ring_replay", 5, "conclusive", (FAULTY,))
    assert ended.alarm.checkpoint is not None
    assert ended.alarm.checkpoint.step == 3, "the newest trusted one lies before the fault"
    for first, second, banned in ended.on_each_rank("refusals"):
        assert first == second
        assert f"alarm {ended.alarm.alarm_id} at step 5 ended this run" in first
        assert f"rank {FAULTY} on node-{FAULTY} has GPU-node-{FAULTY}-{FAULTY} (incident incident-1)" in banned


def test_a_checkpoint_saved_on_an_audited_step_resumes_bit_for_bit(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.checkpoint_in_the_middle_of_a_rerun)
    assert ended["alarm"] is None
    assert ended["start"] == 4
    assert ended["weights"] == ended["uninterrupted"]


def test_a_reproducible_nan_of_one_ranks_data_evicts_nobody_and_the_caller_decides(
    results: list[dict[str, Any]],
) -> None:
    ended = Ended(results, public_cases.nan_of_one_ranks_data_after_a_resume)
    assert ended["start"] == 4
    assert ended.verdict == ("nonfinite", 5, "numerics", ())
    assert ended["second_alarm"] is None
    assert ended["trained"] == [4, 5, 6, 7], "the run went on from the checkpoint in the same process"


def test_a_nan_that_only_the_sum_has_accuses_nobody(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.nan_only_with_data_parallelism)
    assert ended.verdict == ("nonfinite", 0, "numerics", ())
    assert "the sum overflows" in ended.alarm.verdict.reason


def test_one_errant_gpu_is_named_at_its_first_nan_and_no_weight_is_touched(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.one_errant_gpu_makes_nans)
    assert ended["fired"]
    assert ended.verdict == ("nonfinite", 2, "conclusive", (FAULTY,))
    assert ended["trained"] == [0, 1]
    assert ended["finite"]


def test_memory_that_holds_nan_before_anything_is_received_is_no_alarm(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.nan_in_receive_buffers)
    assert ended["filled"], "new tensors must hold NaN, or the case shows nothing"
    assert ended["alarm"] is None


def test_unequal_loss_scales_stop_the_first_update(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.unequal_grad_scaler_scales)
    assert ended.verdict == ("nonfinite", 0, "ambiguous", ())
    assert ended.alarm.verdict.rule == "scales_unequal"


def test_a_step_without_averaging_is_seen_at_the_next_comparison(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.skipped_step_skips_averaging)
    check, step, kind, _ = ended.verdict
    assert check in ("weights", "reduction")
    assert step in (2, 3)
    assert kind == "ambiguous", "nobody's hardware is wrong"


def test_replicas_that_start_differently_are_seen_at_the_first_comparison(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.replicas_start_differently)
    check, step, kind, _ = ended.verdict
    assert (check, kind) == ("weights", "ambiguous"), "three different copies have no majority"
    assert step <= 1


def test_a_drifting_copy_is_named_with_parameter_element_and_bit(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.a_replicated_parameter_drifts)
    assert ended.verdict == ("weights", 3, "conclusive", (FAULTY,))
    (difference,) = ended.alarm.evidence["differences"]
    assert (difference["rank"], difference["tensor"]) == (FAULTY, "3.weight")
    assert 5 in [entry["element"] for entry in difference["first"]]


def test_an_all_reduce_that_differs_on_one_node_stops_the_first_update(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.one_nodes_all_reduce_differs)
    assert ended.verdict == ("reduction", 0, "ambiguous", ())
    assert ended["trained"] == []


def test_elements_that_were_not_reduced_stop_the_first_update(results: list[dict[str, Any]]) -> None:
    ended = Ended(results, public_cases.last_elements_are_not_reduced)
    assert ended.verdict == ("reduction", 0, "ambiguous", ())
    assert ended["trained"] == []


def test_every_case_has_a_test() -> None:
    source = Path(__file__).read_text()
    names = [case.__name__ for case in public_cases.CASES]
    assert [name for name in names if f"Ended(results, public_cases.{name})" not in source] == []
