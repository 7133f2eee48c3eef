"""FSDP2 with replicas: copies of a shard are compared with one another; without replicas the guard refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import sharded_runs
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed

WEIGHT = sharded_runs.TARGET
RUNS: dict[str, list[Any]] = {
    "plain": [{}, 0, False],
    "clean": [{}, 0],
    "weight": [{"3": "weight"}, 3],
    "optimizer state": [{"3": "exp_avg_sq"}, 3],
    "gradient": [{"3": "gradient"}, 2],
    "batch": [{"1": "batch"}, 2],
    "two shards": [{"2": "weight", "3": "weight"}, 2],
}


def alarm_of(results: list[dict[str, Any]], name: str) -> Alarm:
    document = same_everywhere([result[name] for result in results], "alarm")
    assert document is not None, f"{name}: no alarm"
    return Alarm.from_json(document)


def test_two_replicas_of_two_shards_see_every_flip_and_name_the_pair_and_the_tensor(run_ranks: RunRanks) -> None:
    results = run_ranks(sharded_runs.several_sharded_runs, 4, [2, 2], RUNS)

    assert [row["clean"]["holders"] for row in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for row in results:
        assert row["clean"]["alarm"] is None
        assert row["clean"]["saved"] == [1, 3, 5]
        assert row["clean"]["weights"] == row["plain"]["weights"], "the comparison leaves no trace"
    for name, step in {"weight": 3, "optimizer state": 3}.items():
        alarm = alarm_of(results, name)
        assert (alarm.step, alarm.verdict.kind, alarm.suspect_ranks) == (step, "ambiguous", (1, 3)), (
            "two copies: one of them is wrong, and nothing tells which"
        )
        (difference,) = alarm.evidence["differences"]
        assert (difference["rank"], difference["elements"]) == (3, 1)
        assert (difference["first"][0]["element"], difference["first"][0]["flipped_bits"]) == (2, [3])
        assert same_everywhere([row[name] for row in results], "saved") == [1], "nothing is saved over a difference"
    assert alarm_of(results, "weight").evidence["differing_tensor_names"] == [WEIGHT]
    assert alarm_of(results, "optimizer state").evidence["differing_tensor_names"] == [f"{WEIGHT}/exp_avg_sq"]
    gradient = alarm_of(results, "gradient")
    assert (gradient.check, gradient.step, gradient.suspect_ranks) == ("reduction", 2, ())
    nan = alarm_of(results, "batch")
    assert (nan.check, nan.step, nan.verdict.kind, nan.suspect_ranks) == ("nonfinite", 2, "ambiguous", ())
    assert nan.evidence["coverage"].startswith("no audits")
    assert gradient.evidence["bundle_missing"].startswith("one device alone cannot repeat a sum")
    kept = [torch.tensor(values) for row in results for values in row["batch"]["weights"].values()]
    assert all(bool(weights.isfinite().all()) for weights in kept), "the update was dropped"
    both = alarm_of(results, "two shards")
    assert (both.verdict.rule, both.verdict.kind, both.suspect_ranks) == ("several_shards", "ambiguous", (0, 1, 2, 3))
    assert both.evidence["differing_shards"] == 2


def test_three_replicas_name_the_rank_that_holds_the_wrong_shard(run_ranks: RunRanks) -> None:
    # Ranks 2 and 3 are one replica, on one node.
    nodes = [f"node-{rank // 2}" for rank in range(6)]
    runs = {"one": [{"3": "weight"}, 2], "both of a node": [{"2": "weight", "3": "weight"}, 2]}
    results = run_ranks(sharded_runs.several_sharded_runs, 6, [3, 2], runs, nodes=nodes)

    one = alarm_of(results, "one")
    assert (one.check, one.step, one.verdict.kind) == ("weights", 3, "conclusive")
    assert one.suspect_ranks == (3,)
    assert one.suspects[0].node_name == "node-1"
    assert [witness.rank for witness in one.witnesses] == [1, 5]
    assert one.evidence["differing_tensor_names"] == [WEIGHT]
    assert one.evidence["differing_tensors"] == {"3": 1}
    both = alarm_of(results, "both of a node")
    assert (both.verdict.kind, both.suspect_ranks) == ("conclusive", (2, 3))


def test_without_a_second_copy_or_with_audits_the_guard_refuses_and_says_what_to_change(run_ranks: RunRanks) -> None:
    said = run_ranks(sharded_runs.refusals, 4)
    assert said == [said[0]] * 4
    assert "mesh of (4,) holds every shard once" in said[0]["plain"]
    assert "init_device_mesh" in said[0]["plain"]
    assert "mesh of (1, 4) holds every shard once" in said[0]["one replica"]
    assert "not sharded by fully_shard: weight, bias" in said[0]["not sharded"]
    assert said[0]["audits"].startswith("AuditSetupError: the replay audit is for DistributedDataParallel only")
    assert "ShardedGuard" in said[0]["attach"]
    assert said[0]["no before_update"].startswith("ValueError: after_update(0) without before_update(0)")
