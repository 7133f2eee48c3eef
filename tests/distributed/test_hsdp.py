"""FSDP2 with replicas: copies of a shard are compared with one another; without replicas the guard refuses."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import sharded_runs
from tests.distributed.conftest import RunRanks, exit_codes, same_everywhere
from tests.distributed.sharded_runs import FAILING, FAILING_STEP
from truestep import peers
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


HANGS_SECONDS = 160.0
"""What the groups' own time-outs would take."""


def rank_of_a_failing_run(rank: int, directory: str, ends: str, failing_rank_stays: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=f"node-{rank}", TRUESTEP_RUN_ID="run", TRUESTEP_OUTBOX_DIR=f"{directory}/outbox")
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/none.json"
    sys.stderr = (Path(directory) / f"stderr-{rank}.txt").open("w", buffering=1)
    if failing_rank_stays:
        peers.GRACE_SECONDS = 0.5
    timeout = timedelta(seconds=HANGS_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=4, timeout=timeout)
    code = 0
    try:
        sharded_runs.failing_sharded_run(rank, ends)
    except (Exception, SystemExit) as error:
        code = 1
        if isinstance(error, SystemExit):
            code = int(str(error.code))
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # what the interpreter does
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        (Path(directory) / f"told-{rank}.json").write_text(json.dumps(text))
        if rank == FAILING and failing_rank_stays:
            time.sleep(HANGS_SECONDS)  # ended by the test
    peers._tell_of_exit()  # as above
    os._exit(code)


def run_failing(context: ForkServerContext, directory: Path, ends: str, *, stays: bool = False) -> list[int | None]:
    """Exit codes of the four ranks."""
    children = [
        context.Process(target=rank_of_a_failing_run, args=(rank, str(directory), ends, stays), daemon=True)
        for rank in range(4)
    ]
    for child in children:
        child.start()
    return exit_codes(children, FAILING, stays=stays, within=HANGS_SECONDS / 2)


@pytest.mark.parametrize(
    ("ends", "codes", "what"),
    [
        ("error", [1, 1, 1, 1], f"stopped at step {FAILING_STEP}: ValueError: a label is out of range"),
        ("exit", [1, 5, 1, 1], f"stopped at step {FAILING_STEP}: SystemExit: the process ended inside its step"),
        ("exit between steps", [1, 5, 1, 1], f"ended its process before step {FAILING_STEP}, which others had begun"),
        ("batches", [1, 1, 1, 1], f"ran out of batches before step {FAILING_STEP}, which others had begun"),
    ],
)
def test_what_ends_one_rank_of_a_sharded_run_is_told_on_the_others_with_its_step(
    process_context: ForkServerContext,
    distributed_lock: None,
    tmp_path: Path,
    ends: str,
    codes: list[int],
    what: str,
) -> None:
    assert run_failing(process_context, tmp_path, ends) == codes
    for rank in (0, 2, 3):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert f"rank {FAILING} on node-{FAILING} {what}" in told


def test_a_rank_blocked_in_a_sharded_forward_is_ended_where_the_failing_process_lives_on(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    codes = run_failing(process_context, tmp_path, "error", stays=True)
    assert [codes[rank] for rank in (0, 2, 3)] == [peers.EXIT_PEER_FAILED] * 3
    assert f"stopped at step {FAILING_STEP}" in (tmp_path / "stderr-0.txt").read_text()


def test_a_rank_that_has_more_to_do_after_a_sharded_loop_hears_of_no_failure(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    assert run_failing(process_context, tmp_path, "alone") == [0, 0, 0, 0]
    assert " stopped " not in (tmp_path / "stderr-0.txt").read_text()
