"""Checkpoints that functions of the user's own write and read: proved like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from truestep.checkpoints import (
    CheckpointError,
    CheckpointWriteError,
    NoUsableCheckpointError,
    Trust,
    list_checkpoints,
)
from truestep.checkpoints.storage import open_storage
from truestep.cli.verification import verify_checkpoint
from truestep.contract import Step
from truestep.resumption import resume


class Pair:
    """A format of one's own: every tensor a file of raw bytes, in folders."""

    def __init__(self) -> None:
        self.run: Any = None
        self.seen: list[list[str]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        names = {id(parameter): name for name, parameter in self.run.model.named_parameters()}
        state = {f"model/{name}": tensor for name, tensor in self.run.model.state_dict().items()}
        for parameter, values in self.run.optimizer.state.items():
            state |= {f"optimizer/{names[id(parameter)]}/{key}": value for key, value in values.items()}
        return state

    def save(self, directory: Path) -> None:
        assert list(directory.iterdir()) == []
        for name, tensor in self.tensors().items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tensor.detach().numpy().tobytes())

    def load(self, directory: Path) -> None:
        self.seen.append(sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()))
        for name, tensor in self.tensors().items():
            content = bytearray((directory / name).read_bytes())
            tensor.detach().copy_(torch.frombuffer(content, dtype=tensor.dtype).reshape(tensor.shape))


@pytest.fixture
def begin(start: Any) -> Any:
    """``begin(root_uri, seed=0, **arguments)``: a run with a `Pair`, one update old so that the optimizer has state."""

    def make(root_uri: str, **arguments: Any) -> tuple[Any, Pair]:
        pair = Pair()
        pair.run = start(root_uri, **{"save": pair.save, "load": pair.load, **arguments})
        pair.run.train(1)
        return pair.run, pair

    return make


def test_a_run_resumed_by_functions_of_its_own_ends_bit_identical(begin: Any, root_uri: str) -> None:
    whole, pair = begin(root_uri)
    ref = whole.save(9)
    assert whole.checkpoints.promote(Step(9)) == ref
    names = sorted(pair.tensors())
    whole.train(5)
    open_storage(root_uri).replace("step-00000009/files/model/stray", b"not listed")

    again, other = begin(root_uri, seed=99)
    assert resume(again.attachment, again.checkpoints).checkpoint == ref
    assert other.seen == [names], "what the manifest lists, and nothing else"
    again.train(5)
    assert again.losses[1:] == whole.losses[1:]
    assert again.evidence(0) == whole.evidence(0)
    (record,) = list_checkpoints(root_uri)
    assert record.manifest is not None
    assert {entry.path for entry in record.manifest.files} == {*(f"files/{name}" for name in names), "rng-00000.pt"}


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_file_is_named_before_the_function_reads_anything(begin: Any, root_uri: str, damage: str) -> None:
    run, _ = begin(root_uri)
    older = run.save(4)
    run.save(9)
    run.checkpoints.promote(Step(9))
    storage, path = open_storage(root_uri), "step-00000009/files/optimizer/0.weight/exp_avg"
    content = storage.read(path) or b""
    storage.remove_file(path)
    if damage == "changed":
        storage.replace(path, bytes([content[0] ^ 1]) + content[1:])
    again, pair = begin(root_uri)
    point = resume(again.attachment, again.checkpoints)
    assert point.checkpoint == older
    assert f"{path} {'has SHA-256' if damage == 'changed' else 'is missing'}" in point.skipped[0]
    assert len(pair.seen) == 1, "only the older one was given to it"


@pytest.mark.parametrize("lost", ["model/3.weight", "optimizer/3.weight/exp_avg_sq"])
def test_what_a_function_forgets_is_found_by_the_fingerprints(begin: Any, file_root: str, lost: str) -> None:
    run, _ = begin(file_root)
    run.save(4)
    run.checkpoints.promote(Step(4))
    again, pair = begin(file_root, seed=5)
    everything = pair.tensors
    pair.tensors = lambda: {name: tensor for name, tensor in everything().items() if name != lost}
    with pytest.raises(NoUsableCheckpointError, match="loaded from its files"):
        resume(again.attachment, again.checkpoints)


def test_what_save_does_wrong_fails_the_save_and_leaves_no_checkpoint(begin: Any, file_root: str) -> None:
    def fails(_: Path) -> None:
        raise OSError("disk quota exceeded")

    def links(directory: Path) -> None:
        (directory / "weights").symlink_to("/etc/hostname")

    def names(directory: Path) -> None:
        (directory / "a\\b").write_bytes(b"")

    for save, said in [
        (fails, "the function given as save raised OSError: disk quota exceeded"),
        (links, "save left 'weights', which is not a plain file"),
        (names, "without backslashes"),
        (lambda _: None, "save wrote no file on any rank"),
    ]:
        run, _ = begin(file_root, save=save)
        with pytest.raises(CheckpointWriteError, match=f"checkpoint of step 3 was not written; .*{said}"):
            run.save(3)
    assert list_checkpoints(file_root) == []
    left = [path.name for path in Path(urlsplit(file_root).path).rglob("*") if path.is_file()]
    assert set(left) <= {"rng-00000.pt"}, "what was staged is gone"
    good, _ = begin(file_root)
    good.save(3)
    assert [record.trust for record in list_checkpoints(file_root)] == [Trust.WRITTEN]


def test_what_load_raises_is_the_reason_and_without_it_the_checkpoint_is_refused(begin: Any, file_root: str) -> None:
    def fails(_: Path) -> None:
        raise KeyError("model")

    run, _ = begin(file_root)
    run.save(4)
    run.checkpoints.promote(Step(4))
    for arguments, said in [
        ({"load": fails}, "given as load raised KeyError"),
        ({"save": None, "load": None}, "load="),
    ]:
        again, _ = begin(file_root, **arguments)
        with pytest.raises(NoUsableCheckpointError, match=said):
            resume(again.attachment, again.checkpoints)


def test_verify_hashes_the_files_again_and_says_that_only_a_resume_compares_the_weights(
    begin: Any, file_root: str
) -> None:
    run, _ = begin(file_root)
    run.save(4)
    (record,) = list_checkpoints(file_root)
    storage = open_storage(file_root)
    assert verify_checkpoint(storage, record).usable
    assert verify_checkpoint(storage, record, weights=True).weight_problems == (
        "the weights are not compared: only a resume can read what the run's own functions wrote",
    )
    storage.replace("step-00000004/files/model/0.weight", b"")
    problems = [file.problem for file in verify_checkpoint(storage, record).files if file.problem]
    assert len(problems) == 1
    assert "files/model/0.weight has 0 bytes" in problems[0]


def test_functions_that_cannot_work_are_refused(begin: Any, file_root: str) -> None:
    with pytest.raises(CheckpointError, match="save= without load="):
        begin(file_root, load=None)
    with pytest.raises(CheckpointError, match=r"save= with a function of yours: give one"):
        begin(file_root, distributed=True)
