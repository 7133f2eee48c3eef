"""What audits cannot repeat is refused on every rank, and never hangs; and what must not be mistaken is not."""

from __future__ import annotations

import pytest

from tests.distributed import odd_runs
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed


def test_odd_runs_end_on_every_rank_with_the_right_word(run_ranks: RunRanks) -> None:
    results = run_ranks(odd_runs.odd_runs, 3)

    refused = same_everywhere([row["communicating"] for row in results], "refused")
    assert "communicates (allreduce)" in refused
    assert "outside of compute_loss" in refused

    poisoned = Alarm.from_json(same_everywhere([row["communicating, NaN"] for row in results], "alarm"))
    assert (poisoned.check, poisoned.step, poisoned.verdict.kind) == ("nonfinite", 0, "ambiguous")
    assert poisoned.suspect_ranks == (), "a replay that raised proves nothing"
    assert all("communicates" in replay["failed"] for replay in poisoned.evidence["replays"])

    assert "disagree on the checks of step 3" in same_everywhere([row["schedules"] for row in results], "refused")
    assert same_everywhere([row["schedules"] for row in results], "steps") == 3
    assert "the same checkpoints" in same_everywhere([row["guards"] for row in results], "refused")
    assert same_everywhere([row["guards"] for row in results], "steps") == 0

    constant = Alarm.from_json(same_everywhere([row["constant"] for row in results], "alarm"))
    assert (constant.check, constant.step, constant.suspect_ranks) == ("weights", 3, (1,))
    assert constant.evidence["differing_tensor_names"] == ["scale"], "and none of the buffers that follow the batches"

    for row in results:
        assert row["power"]["before"] == row["power"]["after"]
        assert row["power"]["before"][1], "the test needs a hook that remembers errors"

    for case, kind in (("written", "inputs"), ("written, rebuilt", "numerics"), ("popped", "numerics")):
        alarm = Alarm.from_json(same_everywhere([row[f"no label, {case}"] for row in results], "alarm"))
        assert (alarm.step, alarm.verdict.kind, alarm.suspect_ranks) == (1, kind, ()), case
    assert same_everywhere([row["encoded"] for row in results], "alarm") is None

    assert [row["counting, guarded"] for row in results] == [row["counting, plain"] for row in results]
    assert results[0]["counting, guarded"]["calls"] == 6
    hooked = Alarm.from_json(same_everywhere([row["hook on a parameter"] for row in results], "alarm"))
    assert (hooked.verdict.kind, hooked.verdict.rule) == ("nondeterministic", "replay_differs")
    assert hooked.suspect_ranks == ()

    assert "[2] is a builtins.object" in same_everywhere([row["opaque"] for row in results], "refused")
    assert same_everywhere([row["opaque"] for row in results], "trained") == 0

    few = [row["rebuilding of too few"] for row in results]
    assert "rebuild_batch(step, rank), and <lambda>(step) cannot be" in same_everywhere(few, "refused")
    assert same_everywhere(few, "trained") == 0, "said in front of the first step"
    raising = same_everywhere([row["rebuilding that raises"] for row in results], "refused")
    assert "rebuild_batch(1, 1) raised TypeError: unsupported operand" in raising
    assert "is called with two integers, (step, rank)" in raising
    assert "compute_loss" not in raising

    accumulated = Alarm.from_json(same_everywhere([row["accumulated"] for row in results], "alarm"))
    assert (accumulated.verdict.kind, accumulated.suspect_ranks) == ("ambiguous", (2,)), "another micro-batch was kept"
