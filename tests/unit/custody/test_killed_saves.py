"""A save that is killed at any moment leaves a whole checkpoint or none; a save that fails on one rank fails on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint_kills import kill_at_random_moments
from tests.distributed.conftest import distributed_lock  # noqa: F401 - the fixture
from truestep.checkpoints import list_checkpoints
from truestep.checkpoints.errors import AlreadyWrittenError, CheckpointWriteError
from truestep.checkpoints.storage import open_storage
from truestep.contract import Step

KILLS = {1: 10, 3: 8}
"""By number of ranks; `make soak` kills 200 times each."""


@pytest.mark.distributed
@pytest.mark.usefixtures("distributed_lock")
@pytest.mark.parametrize("ranks", KILLS)
def test_killed_at_random_moments_a_run_leaves_nothing_torn_wrongly_trusted_or_lost(
    file_root: str, tmp_path: Path, ranks: int
) -> None:
    seen = kill_at_random_moments(file_root, tmp_path / "journal", KILLS[ranks], seed=20261120, ranks=ranks)
    assert seen["torn saves passed over"] > 0, "no kill fell into a save: the test has shown nothing"
    assert seen["resumes from a trusted one"] > 0


def test_the_next_save_of_a_step_clears_what_a_killed_one_left(start: Any, root_uri: str) -> None:
    run = start(root_uri)
    storage = open_storage(root_uri)
    storage.replace("step-00000004/model.pt", b"half a model")
    storage.replace("step-00000004/rng-00007.pt", b"of a larger run")
    assert list_checkpoints(root_uri) == []
    run.save(4)
    assert storage.read("step-00000004/rng-00007.pt") is None
    (record,) = list_checkpoints(root_uri)
    assert record.directory == "step-00000004"


def test_a_manifest_is_never_replaced(root_uri: str) -> None:
    storage = open_storage(root_uri)
    storage.write_once("step-00000001/manifest.json", b"first")
    with pytest.raises(AlreadyWrittenError, match=r"step-00000001/manifest\.json exists already"):
        storage.write_once("step-00000001/manifest.json", b"second")
    assert storage.read("step-00000001/manifest.json") == b"first"


def test_a_stream_that_breaks_off_leaves_what_was_there_before(root_uri: str) -> None:
    storage = open_storage(root_uri)
    storage.replace("step-00000001/model.pt", b"whole")

    def break_off(stream: Any) -> None:
        stream.write(b"half")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        storage.write_stream("step-00000001/model.pt", break_off)
    assert storage.read("step-00000001/model.pt") == b"whole"


def test_a_large_object_goes_up_in_parts_and_comes_back_verified(
    start: Any, root_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.checkpoints.s3.PART_BYTES", 5 << 20)
    storage = open_storage(root_uri)
    tensor = torch.arange(3_000_000, dtype=torch.int32)
    entry = storage.write_stream("step-00000001/model.pt", lambda stream: torch.save(tensor, stream))
    assert entry.bytes > 2 * (5 << 20)
    with storage.open_verified("step-00000001/model.pt", entry) as file:
        assert torch.equal(torch.load(file, weights_only=True), tensor)


@pytest.mark.parametrize("extra", [Path("a class that weights_only refuses"), lambda: None])
def test_extra_state_that_could_not_be_read_back_fails_the_save_and_leaves_no_checkpoint(
    start: Any, tmp_path: Path, extra: object
) -> None:
    root_uri = (tmp_path / "checkpoints").as_uri()
    run = start(root_uri, extra_save=lambda: extra, extra_load=print)
    with pytest.raises(CheckpointWriteError, match=r"step 3 was not written; .*state_dict\(\)"):
        run.save(3)
    assert list_checkpoints(root_uri) == []
    assert run.events() == []
    assert run.checkpoints.promote(Step(3)) is None
