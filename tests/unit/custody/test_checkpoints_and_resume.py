"""Saving, promoting, listing and resuming, on a directory and on S3."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from truestep.checkpoints import (
    CheckpointError,
    NoUsableCheckpointError,
    Trust,
    VerifiedCheckpoints,
    list_checkpoints,
)
from truestep.checkpoints.storage import open_storage
from truestep.contract import CheckpointRef, DetailType, Step
from truestep.resumption import Candidate, _rank_count_advice, resume


def test_a_resumed_run_ends_bit_identical_to_one_that_was_never_interrupted(start: Any, root_uri: str) -> None:
    whole = start(root_uri)
    whole.train(10)
    ref = whole.save(9)
    assert whole.checkpoints.promote(Step(9)) == ref
    whole.train(10)

    again = start(root_uri, seed=99)
    point = resume(again.attachment, again.checkpoints)
    assert (point.start_step, point.checkpoint, point.incident_id, point.skipped) == (10, ref, "", ())
    assert again.attachment.resumed == point
    assert again.checkpoints.newest_trusted == ref
    again.train(10)
    assert again.losses == whole.losses[10:]
    assert again.fingerprint() == whole.fingerprint()
    for name, buffer in whole.model.named_buffers():
        assert torch.equal(buffer, dict(again.model.named_buffers())[name]), name


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_shares_bring_back_an_optimizer_with_and_without_state_and_leave_the_live_one_alone(
    start: Any, file_root: str, monkeypatch: pytest.MonkeyPatch, trained: int, kind: Any, asynchronous: bool
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", kind)
    whole = start(file_root, distributed=True, asynchronous=asynchronous)
    whole.optimizer.param_groups[0]["lr"] = 0.003
    whole.train(trained)
    whole.optimizer.zero_grad()
    before = whole.evidence(9)
    whole.save(9)
    assert whole.evidence(9) == before, "saving changed what was saved"
    whole.train(1)
    whole.checkpoints.promote(Step(9))
    whole.checkpoints.finish()
    assert whole.checkpoints.newest_trusted is not None

    again = start(file_root, seed=99, distributed=True)
    assert resume(again.attachment, again.checkpoints).start_step == 10
    assert again.evidence(9) == before
    again.train(1)
    assert again.fingerprint() == whole.fingerprint()


def drawn() -> tuple[float, float, float]:
    """One number of each generator."""
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: S311


def test_python_numpy_and_torch_generators_go_on_where_they_were(start: Any, file_root: str) -> None:
    run = start(file_root)
    run.save(0)
    run.checkpoints.promote(Step(0))
    expected = drawn()
    resume((other := start(file_root, seed=5)).attachment, other.checkpoints)
    assert drawn() == expected


def test_a_checkpoint_that_no_audit_followed_is_never_resumed_from(start: Any, root_uri: str) -> None:
    run = start(root_uri)
    trusted = run.save(9)
    run.checkpoints.promote(Step(12))
    run.train(1)
    latest = run.save(19)
    assert run.checkpoints.promote(Step(18)) == trusted

    again = start(root_uri, seed=1)
    point = resume(again.attachment, again.checkpoints)
    assert point.checkpoint == trusted
    assert len(point.skipped) == 1
    assert latest.uri in point.skipped[0]
    assert "no audit" in point.skipped[0]


def test_a_root_without_any_trusted_checkpoint_starts_from_step_0_and_says_what_it_passed_over(
    start: Any, root_uri: str
) -> None:
    empty = start(root_uri)
    assert resume(empty.attachment, empty.checkpoints).start_step == 0
    ref = empty.save(4)
    again = start(root_uri)
    point = resume(again.attachment, again.checkpoints)
    assert (point.start_step, point.checkpoint) == (0, None)
    assert ref.uri in point.skipped[0]


def test_the_catalogue_lists_newest_first_with_trust(start: Any, root_uri: str) -> None:
    run = start(root_uri)
    refs = [run.save(step) for step in (4, 9, 14)]
    run.checkpoints.promote(Step(10))
    records = list_checkpoints(root_uri)
    assert [record.ref for record in records] == refs[::-1]
    assert [record.trust for record in records] == [Trust.WRITTEN, Trust.TRUSTED, Trust.TRUSTED]
    assert records[1].mark is not None
    assert (records[1].mark.clean_through, records[1].mark.manifest_sha256) == (10, refs[1].manifest_sha256)
    assert records[0].manifest is not None
    assert {entry.path for entry in records[0].manifest.files} == {"model.pt", "optimizer.pt", "rng-00000.pt"}


def test_promotion_covers_only_this_attempts_checkpoints(start: Any, file_root: str) -> None:
    """A killed attempt's checkpoint was computed by GPUs that this attempt's audits did not see."""
    start(file_root).save(4)
    second = start(file_root)
    ref = second.save(9)
    assert second.checkpoints.promote(Step(9)) == ref
    assert [record.trust for record in list_checkpoints(file_root)] == [Trust.TRUSTED, Trust.WRITTEN]


def test_a_step_trained_again_gets_a_directory_of_its_own(start: Any, root_uri: str) -> None:
    first = start(root_uri).save(9)
    second_run = start(root_uri, seed=1)
    second = second_run.save(9)
    assert first.uri != second.uri
    assert second.uri.endswith(f"step-00000009-{second_run.attachment.run.attempt_id[:8]}")
    assert {record.ref for record in list_checkpoints(root_uri)} == {first, second}


def test_retention_keeps_the_newest_and_never_removes_the_newest_trusted(start: Any, root_uri: str) -> None:
    run = start(root_uri, keep=2)
    for step in (0, 1):
        run.save(step)
    run.checkpoints.promote(Step(1))
    for step in (2, 3, 4):
        run.save(step)
    again = start(root_uri, keep=2)
    again.save(5)
    again.checkpoints.promote(Step(5))
    assert [record.ref.step for record in list_checkpoints(root_uri)] == [5, 4]
    third = start(root_uri, keep=1)
    for step in (6, 7):
        third.save(step)
    third.checkpoints._expire(1)
    assert [record.ref.step for record in list_checkpoints(root_uri)] == [7, 5]


def test_what_is_younger_than_the_detection_may_take_is_kept_whatever_its_number(start: Any, file_root: str) -> None:
    run = start(file_root, keep=1, keep_for=timedelta(hours=1))
    for step in range(3):
        run.save(step)
    run.checkpoints.promote(Step(2))
    assert [record.ref.step for record in list_checkpoints(file_root)] == [2, 1, 0]
    later = start(file_root, keep=1)
    later.save(3)
    later.checkpoints.promote(Step(3))
    assert [record.ref.step for record in list_checkpoints(file_root)] == [3]


def test_a_root_that_cannot_be_written_to_is_said_before_training(start: Any, tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("a file where the volume should be mounted")
    with pytest.raises(
        CheckpointError, match=r"cannot be written below .*/volume/run: every rank: .*nothing was trained"
    ):
        start((tmp_path / "volume" / "run").as_uri())


def test_the_probe_of_the_root_leaves_nothing_behind(start: Any, root_uri: str) -> None:
    start(root_uri)
    storage = open_storage(root_uri)
    assert storage.directories("") == []
    if root_uri.startswith("file"):
        assert list(Path(urlsplit(root_uri).path).iterdir()) == []


def test_extra_state_is_saved_and_loaded(start: Any, root_uri: str) -> None:
    loaded: list[Any] = []
    rates = torch.tensor([0.1, 0.2])
    extra = {"scheduler": {"last_epoch": 3, "rates": rates}}
    run = start(root_uri, extra_save=lambda: extra, extra_load=loaded.append)
    run.save(0)
    run.checkpoints.promote(Step(0))
    again = start(root_uri, extra_save=lambda: extra, extra_load=loaded.append)
    resume(again.attachment, again.checkpoints)
    assert loaded[0]["scheduler"]["last_epoch"] == 3
    assert torch.equal(loaded[0]["scheduler"]["rates"], rates)


def test_written_trusted_and_resumed_are_reported_with_what_was_loaded(start: Any, root_uri: str) -> None:
    run = start(root_uri)
    ref = run.save(9)
    run.checkpoints.promote(Step(9))
    types = [entry.detail_type for entry in run.events()]
    assert types == [DetailType.CHECKPOINT_WRITTEN, DetailType.CHECKPOINT_TRUSTED]
    assert run.events()[1].detail["checkpoint"]["manifest_sha256"] == ref.manifest_sha256
    again = start(root_uri)
    resume(again.attachment, again.checkpoints)
    (event,) = again.events()
    assert event.detail_type is DetailType.RESUMED
    assert (event.detail["step"], event.detail["nodes"], event.detail["incident_id"]) == (10, ["node-a"], "")


class TwoRanks:
    """An attachment that says it has two ranks; everything else is the one it wraps."""

    world_size = 2

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_another_number_of_ranks_is_refused_with_the_number_to_use(
    start: Any, root_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(root_uri)
    run.save(0)
    run.checkpoints.promote(Step(0))
    bigger = start(root_uri)
    bigger.attachment = TwoRanks(bigger.attachment)
    with pytest.raises(NoUsableCheckpointError, match=r"written by 1 rank and this run has 2.*start 1 rank") as told:
        resume(bigger.attachment, bigger.checkpoints)
    assert str(told.value).splitlines()[-1] == "start 1 rank instead of 2; nothing was started", "no copy would help"
    assert "refused" not in caplog.text, "the error lists it already"


def test_advice_on_ranks_is_given_only_where_ranks_are_the_only_trouble() -> None:
    def advice(*written: tuple[int, bool], reshard: bool = False) -> str:
        ref = CheckpointRef(uri="file:///r/step-00000000", step=Step(0), manifest_sha256="0" * 64)
        candidates = [Candidate(ref=ref, trusted=True, written_by=n, reshardable=layout) for n, layout in written]
        return _rank_count_advice(candidates, 2, reshard=reshard)

    assert advice((3, False), (8, False)) == "start 3 or 8 ranks instead of 2"
    assert advice((3, True)) == "start 3 ranks instead of 2, or give VerifiedCheckpoints(..., reshard=True)"
    assert [advice((3, False), (2, False)), advice((3, True), reshard=True), advice()] == ["", "", ""]


def test_another_architecture_is_refused_rather_than_started_from_nothing(start: Any, file_root: str) -> None:
    run = start(file_root)
    run.save(0)
    run.checkpoints.promote(Step(0))
    other = start(file_root)
    other.checkpoints.state.model = torch.nn.Linear(3, 3)
    with pytest.raises(NoUsableCheckpointError, match="state_dict"):
        resume(other.attachment, other.checkpoints)


@pytest.mark.parametrize("root", ["checkpoints", "http://host/x", "file://relative/x", "s3://", ""])
def test_a_root_that_is_no_storage_is_refused_with_the_two_forms(start: Any, root: str) -> None:
    with pytest.raises(CheckpointError, match=r"s3://bucket/prefix nor file:///absolute"):
        start(root)


def test_settings_that_cannot_work_are_refused(start: Any, file_root: str) -> None:
    with pytest.raises(CheckpointError, match="keep is 0"):
        start(file_root, keep=0)
    with pytest.raises(CheckpointError, match="belong together"):
        start(file_root, extra_save=dict)


def test_a_root_other_than_the_environments_is_refused_because_its_tombstone_would_hold_nothing_back(
    start: Any, file_root: str
) -> None:
    run = start(file_root)
    attached = (run.attachment, run.model, run.optimizer)
    reporter = run.checkpoints.reporter
    VerifiedCheckpoints(f"{file_root}/", *attached, reporter=reporter)
    with pytest.raises(CheckpointError, match="TRUESTEP_CHECKPOINT_ROOT"):
        VerifiedCheckpoints(f"{file_root}-2", *attached, reporter=reporter)
