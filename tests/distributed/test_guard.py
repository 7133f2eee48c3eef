"""What the guard does around the checks: trust, reporting, loops of one's own, and everything that is not a faulty
device."""

from __future__ import annotations

import pytest

from tests.distributed import custody_scenarios, scenarios
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed


def test_audits_promote_checkpoints_verify_the_resume_and_one_healthy_rank_reports(run_ranks: RunRanks) -> None:
    results = run_ranks(scenarios.trusted_run, 3, 13)

    alarm = Alarm.from_json(same_everywhere(results, "alarm"))
    assert (alarm.step, alarm.suspect_ranks, alarm.clean_through) == (15, (0,), 11)
    assert alarm.checkpoint is not None
    assert alarm.checkpoint.step == 11
    assert same_everywhere(results, "saved") == [2, 5, 8, 11, 14]
    assert same_everywhere(results, "promoted") == [3, 7, 11]
    assert same_everywhere(results, "checks")[3] == dict.fromkeys(
        ["nonfinite", "reduction", "ring_replay", "weights", "optimizer_state", "update_replay"], 11
    )
    same_everywhere(results, "evidence")
    assert [result["verified"] for result in results] == [[3], [], []]
    assert [result["sent"] for result in results] == [[], [alarm.alarm_id], []], "the lowest rank that is no suspect"


@pytest.mark.parametrize("variant", ["accumulation", "scaler", "user_hook"])
def test_loops_of_ones_own_keep_their_bits_and_a_fault_in_them_is_located(run_ranks: RunRanks, variant: str) -> None:
    plain = run_ranks(scenarios.own_loop, 3, variant, -1)
    guarded = run_ranks(scenarios.own_loop, 3, variant, None)
    assert same_everywhere(guarded, "alarm") is None
    assert same_everywhere(guarded, "weights") == same_everywhere(plain, "weights")
    assert same_everywhere(guarded, "clean_through") == 11

    results = run_ranks(scenarios.own_loop, 3, variant, 1)
    alarm = Alarm.from_json(same_everywhere(results, "alarm"))
    assert results[1]["firings"] > 0
    assert (alarm.step, alarm.verdict.kind, alarm.suspect_ranks) == (7, "conclusive", (1,))


def test_a_rebuilt_batch_that_differs_from_the_trained_one_accuses_nobody(run_ranks: RunRanks) -> None:
    alarm = Alarm.from_json(same_everywhere(run_ranks(scenarios.misbehaving_run, 3, "rebuild_differs"), "alarm"))
    assert (alarm.verdict.kind, alarm.suspect_ranks) == ("inputs", ())
    assert "rebuild_batch" in str(alarm.evidence["inputs"])


def test_a_loss_that_never_repeats_is_a_software_verdict(run_ranks: RunRanks) -> None:
    alarm = Alarm.from_json(same_everywhere(run_ranks(scenarios.misbehaving_run, 3, "never_repeats"), "alarm"))
    assert (alarm.check, alarm.verdict.kind, alarm.suspect_ranks) == ("ring_replay", "nondeterministic", ())


def test_a_replay_that_fails_on_one_rank_is_no_alarm_but_makes_nothing_trusted(run_ranks: RunRanks) -> None:
    results = run_ranks(scenarios.misbehaving_run, 3, "one_replay_fails")
    assert same_everywhere(results, "alarm") is None
    assert same_everywhere(results, "steps") == 9
    assert same_everywhere(results, "promoted") == []


def test_a_loss_that_cannot_be_replayed_anywhere_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    results = run_ranks(scenarios.misbehaving_run, 3, "no_replay_runs")
    assert "RuntimeError: out of memory" in same_everywhere(results, "error")


def test_a_kernel_without_deterministic_version_leaves_loss_only_audits_that_promote_nothing(
    run_ranks: RunRanks,
) -> None:
    results = run_ranks(scenarios.misbehaving_run, 3, "nondeterministic_kernel")
    assert same_everywhere(results, "alarm") is None
    assert same_everywhere(results, "steps") == 9
    assert same_everywhere(results, "promoted") == []


def test_averaged_gradients_that_differ_drop_the_update_and_accuse_nobody(run_ranks: RunRanks) -> None:
    results = run_ranks(scenarios.misbehaving_run, 3, "reduction_differs")
    alarm = Alarm.from_json(same_everywhere(results, "alarm"))
    assert (alarm.check, alarm.step, alarm.verdict.kind) == ("reduction", 0, "ambiguous")
    assert alarm.suspect_ranks == ()
    assert same_everywhere(results, "steps") == 0


def test_a_banned_gpu_is_refused_on_every_rank_by_name(run_ranks: RunRanks) -> None:
    error = same_everywhere(run_ranks(custody_scenarios.banned_attach, 3, ["GPU-node-1-1"]), "error")
    assert "rank 1 on node-1 has GPU-node-1-1 (incident incident-1)" in error
    assert same_everywhere(run_ranks(custody_scenarios.banned_attach, 3, ["GPU-other"]), "error") == ""


def test_evidence_arrives_whole_and_a_corrupted_row_is_sent_again(run_ranks: RunRanks) -> None:
    results = run_ranks(custody_scenarios.transport, 3)
    assert same_everywhere(results, "rows") == [[0, 0], [1, 10], [2, 20]]
    assert same_everywhere(results, "again") == [0, 1, 2]
    assert same_everywhere(results, "calls") == 6, "two rounds of three rows on every rank"
    assert [result["moved"] for result in results] == [{}, {"0": "payload-0"}, {"1": "payload-1", "2": "payload-2"}]
    assert same_everywhere(results, "extremes") == [[0, 2], [-(2**63), -(2**63) + 2], [2**63 - 3, 2**63 - 1]]
    assert same_everywhere(results, "broadcast") == "from two"
    assert same_everywhere(results, "agrees") == [True, False]
