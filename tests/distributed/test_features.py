"""Audits are exact and leave no trace, whatever the training uses: the guarded run ends as the plain one, bit for bit,
and a fault in the middle of it is pinned on the right rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import features
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm

pytestmark = pytest.mark.distributed

COMPILED = [name for name in features.FEATURES if name.startswith("compiled")]
UNCOMPILED = [name for name in features.FEATURES if name not in (*COMPILED, features.INDUCTOR)]


# Several features share a process group; three groups, so that none comes near the time limit on a busy machine.
@pytest.mark.parametrize("names", [UNCOMPILED[::2], UNCOMPILED[1::2], COMPILED], ids=["even", "odd", "compiled"])
def test_audited_runs_end_as_plain_ones_and_faults_are_pinned_on_their_rank(
    run_ranks: RunRanks, names: list[str]
) -> None:
    results = run_ranks(features.feature_runs, 3, names)

    problems = [f"{name}: {problem}" for name in names for problem in _problems([row[name] for row in results])]
    assert not problems, "\n".join(problems)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine")
def test_what_inductor_compiles_is_audited_to_the_bit_and_left_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    compiled = tmp_path / "compiled"
    results = run_ranks(features.inductor_runs, 2, str(compiled))
    assert same_everywhere(results, "alarm") is None
    assert same_everywhere(results, "clean_through") == features.STEPS - 1, "gradients were compared, and were equal"
    assert [row["guarded"] for row in results] == [row["plain"] for row in results]
    assert list(compiled.rglob("*.so")), "the compiler must have made code, or the test shows nothing"


def _problems(rows: list[dict[str, Any]]) -> list[str]:
    problems: list[str] = []
    for rank, row in enumerate(rows):
        plain, guarded = row["plain"], row["guarded"]
        problems += [f"rank {rank}: {key} differs from the plain run's" for key in plain if plain[key] != guarded[key]]
    if same_everywhere(rows, "false_alarm") is not None:
        problems.append(f"false alarm: {rows[0]['false_alarm']['verdict']}")
    if same_everywhere(rows, "clean_through") != features.STEPS - 1:
        problems.append(f"the last audit did not cover gradients: clean through {rows[0]['clean_through']}")
    if rows[features.FAULTY_RANK]["firings"] == 0:
        problems.append("the fault did not fire")
    document = same_everywhere(rows, "alarm")
    if document is None:
        return [*problems, "the fault went unseen"]
    alarm = Alarm.from_json(document)
    seen = (alarm.check, alarm.step, alarm.verdict.kind, alarm.suspect_ranks, alarm.clean_through)
    expected = ("ring_replay", features.FAULT_STEP, "conclusive", (features.FAULTY_RANK,), features.FAULT_STEP - 2)
    if seen != expected:
        problems.append(f"the alarm says {seen}, not {expected}")
    return problems
