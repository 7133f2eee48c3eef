"""One byte changed anywhere in a checkpoint is found, named, and the next older trusted checkpoint is used."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from benchmarks.checkpoint_corruptions import FILES as EVERY_FILE
from benchmarks.checkpoint_corruptions import damage_everywhere
from truestep.checkpoints import NoUsableCheckpointError, list_checkpoints
from truestep.checkpoints.storage import open_storage
from truestep.contract import CheckpointRef, Step, TrustMark, canonical_bytes, from_json
from truestep.resumption import resume

FILES = ["model.pt", "optimizer.pt", "rng-00000.pt"]
POSITIONS = 25
"""`make soak` tries 500."""


def two_trusted(start: Any, root_uri: str) -> tuple[CheckpointRef, CheckpointRef]:
    run = start(root_uri)
    older = run.save(4)
    run.train(2)
    newer = run.save(9)
    run.checkpoints.promote(Step(9))
    return older, newer


@pytest.mark.parametrize("way", EVERY_FILE)
def test_every_damage_to_any_file_is_refused_by_name_and_the_older_checkpoint_used(tmp_path: Path, way: str) -> None:
    seen = damage_everywhere(tmp_path, POSITIONS, seed=20261129, way=way)
    assert all(seen[f"{name}, byte changed"] == POSITIONS for name in EVERY_FILE[way]), seen


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named_and_the_older_checkpoint_used(start: Any, root_uri: str, name: str) -> None:
    older, _ = two_trusted(start, root_uri)
    storage = open_storage(root_uri)
    path = f"step-00000009/{name}"
    content = bytearray(storage.read(path) or b"")
    chance = random.Random(3)  # noqa: S311
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    storage.replace(path, bytes(content))

    run = start(root_uri, seed=7)
    point = resume(run.attachment, run.checkpoints)
    assert point.checkpoint == older
    (sentence,) = point.skipped
    assert f"step-00000009/{name} has SHA-256" in sentence
    assert "its manifest says" in sentence


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shortened_file_is_named(start: Any, root_uri: str, name: str) -> None:
    older, newer = two_trusted(start, root_uri)
    storage = open_storage(root_uri)
    storage.remove_file(f"step-00000009/{name}")
    content = storage.read(f"step-00000004/{name}") or b""
    storage.replace(f"step-00000004/{name}", content[:-1])
    run = start(root_uri)
    with pytest.raises(NoUsableCheckpointError) as raised:
        resume(run.attachment, run.checkpoints)
    assert f"{newer.uri}: refused" in str(raised.value)
    assert f"step-00000009/{name} is missing" in str(raised.value)
    assert f"step-00000004/{name} has {len(content) - 1} bytes, its manifest says {len(content)}" in str(raised.value)
    assert older.uri in str(raised.value)


def test_a_changed_manifest_is_another_checkpoint_and_loses_its_trust(start: Any, root_uri: str) -> None:
    older, _ = two_trusted(start, root_uri)
    storage = open_storage(root_uri)
    content = storage.read("step-00000009/manifest.json") or b""
    storage.replace("step-00000009/manifest.json", content.replace(b'"world_size":1', b'"world_size":3'))
    run = start(root_uri)
    point = resume(run.attachment, run.checkpoints)
    assert point.checkpoint == older
    assert "another manifest" in point.skipped[0]


NESTED = b"[" * 100_000


@pytest.mark.parametrize("name", ["manifest.json", "trusted.json"])
def test_brackets_nested_too_deep_cost_that_checkpoint_and_no_other(start: Any, root_uri: str, name: str) -> None:
    older, _ = two_trusted(start, root_uri)
    open_storage(root_uri).replace(f"step-00000009/{name}", NESTED)
    assert [record.trust for record in list_checkpoints(root_uri)] == ["unreadable", "trusted"]
    run = start(root_uri)
    assert resume(run.attachment, run.checkpoints).checkpoint == older


def _forge(root_uri: str, name: str, value: object) -> None:
    """Replace a file by another valid one and make manifest and trust mark agree: only the weights give it away."""
    directory = Path(urlsplit(root_uri).path) / "step-00000009"
    torch.save(value, directory / name)
    content = (directory / name).read_bytes()
    manifest = json.loads((directory / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        if entry["path"] == name:
            entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (directory / "manifest.json").write_text(json.dumps(manifest))
    mark = json.loads((directory / "trusted.json").read_bytes())
    manifest_sha256 = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    forged = from_json(TrustMark, {**mark, "manifest_sha256": manifest_sha256, "sha256": ""})
    (directory / "trusted.json").write_bytes(canonical_bytes(forged))


def test_weights_that_were_damaged_before_they_were_hashed_are_caught_by_their_fingerprint(
    start: Any, file_root: str
) -> None:
    older, _ = two_trusted(start, file_root)
    state = torch.load(Path(urlsplit(file_root).path) / "step-00000009" / "model.pt", weights_only=True)
    state["0.weight"].view(torch.int32)[3, 2] ^= 1
    _forge(file_root, "model.pt", state)
    run = start(file_root)
    point = resume(run.attachment, run.checkpoints)
    assert point.checkpoint == older
    assert "first differing tensor: 0.weight" in point.skipped[0]


def test_optimizer_state_that_was_damaged_before_it_was_hashed_is_caught(start: Any, file_root: str) -> None:
    older, _ = two_trusted(start, file_root)
    state = torch.load(Path(urlsplit(file_root).path) / "step-00000009" / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg_sq"].view(torch.int32)[0, 0] ^= 1
    _forge(file_root, "optimizer.pt", state)
    run = start(file_root)
    point = resume(run.attachment, run.checkpoints)
    assert point.checkpoint == older
    assert "optimizer state loaded from optimizer.pt differs" in point.skipped[0]


class Payload:
    """What an attacker would put into a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_a_checkpoint_that_holds_code_is_refused_and_the_code_not_run(
    start: Any, file_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    older, _ = two_trusted(start, file_root)
    _forge(file_root, "rng-00000.pt", {"rng": Payload()})
    run = start(file_root)
    point = resume(run.attachment, run.checkpoints)
    assert point.checkpoint == older
    assert "weights_only=True" in point.skipped[0]
    assert not (tmp_path / "executed").exists()
