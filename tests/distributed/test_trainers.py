"""Real transformers and real Lightning with truestep's callbacks: corrupted, detected, resumed, bit-identical."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.distributed import trainer_runs
from tests.distributed.conftest import RunRanks, same_everywhere

pytestmark = pytest.mark.distributed
WORLD_SIZE = 3


@pytest.mark.parametrize(
    ("example", "library", "accumulate"), [("huggingface", "transformers", 2), ("lightning", "lightning", 2)]
)
def test_the_resumed_run_ends_with_the_weights_of_the_clean_one(
    example: str, library: str, accumulate: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; make setup-dev installs it")
    arguments = (WORLD_SIZE, example, tmp_path.as_uri(), accumulate)
    results = run_ranks(trainer_runs.three_trainings, WORLD_SIZE, *arguments)
    clean, faulty, resumed = (same_everywhere(results, name) for name in ("clean", "faulty", "resumed"))
    assert (clean["start_step"], clean["alarm"]) == (0, None)
    assert faulty["alarm"] == [11, 1], "step and suspect"
    assert (resumed["start_step"], resumed["alarm"]) == (6, None)
    assert resumed["weights"] == clean["weights"] != faulty["weights"]


def test_an_epochs_last_accumulation_may_be_shorter_than_the_others(run_ranks: RunRanks, tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed; make setup-dev installs it")
    for updates in run_ranks(trainer_runs.short_windows, 2, 2, tmp_path.as_uri()):
        assert updates == {"length": 4, "no length": 4}
