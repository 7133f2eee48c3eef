"""Writing a bundle: bounded, in time, and never at the alarm's cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.bundle.computation import ALARM, STEP, Witness, _OneRank, build
from truestep.bundle import BundleSettings, writing
from truestep.bundle.confirming import confirm
from truestep.bundle.contents import BUNDLE_NAME, BundleError
from truestep.bundle.failing import choose_pass
from truestep.bundle.reading import open_bundle
from truestep.checkpoints.storage import open_storage
from truestep.contract import (
    CheckpointManifest,
    CheckpointRef,
    FileEntry,
    NodeName,
    Rank,
    Step,
    TrustMark,
    Verdict,
    VerdictKind,
    canonical_bytes,
    sha256_hex,
)
from truestep.fingerprint import fingerprint_model
from truestep.judge import AuditEvidence, Recorded, Replayed, judge_audit, mismatching_edges


def test_a_bundle_holds_what_its_marker_says(tmp_path: Path) -> None:
    uri = Witness().write(tmp_path)["bundle_uri"]
    assert uri == f"{tmp_path.as_uri()}/bundles/{ALARM}"
    manifest = open_bundle(uri).manifest
    assert {entry.path for entry in manifest.files} == {"inputs.pt", "weights.pt", "recorded.json"}
    assert (manifest.alarm_id, manifest.step, manifest.weights.kind) == (ALARM, STEP, "file")
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.modes["num_threads"] == 1


def test_the_modes_of_the_audit_are_put_back_for_the_replay(tmp_path: Path) -> None:
    """Another number of threads, deterministic kernels: what confirm runs under is what the run had."""
    witness = Witness()
    modes = {**witness.failing().modes, "num_threads": 3, "deterministic": True, "deterministic_warn_only": True}
    uri = witness.write(tmp_path, failing=witness.failing(modes=modes))["bundle_uri"]
    seen: list[tuple[int, bool]] = []
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    model, compute_loss = build()

    def looking(stage: Any, batch: Any) -> Any:
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return compute_loss(stage, batch)

    confirm(open_bundle(uri), model, looking, torch.device("cpu"), repeat=1)
    assert seen == [(3, True)]
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_weights_above_the_limit_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    witness = Witness()
    limit = len(witness.failing().payload) + 100
    bundle = open_bundle(witness.write(tmp_path, max_bytes=limit)["bundle_uri"])
    assert bundle.manifest.weights.kind == "left_out"
    assert not (tmp_path / "bundles" / ALARM / "weights.pt").exists()
    with pytest.raises(BundleError, match=r"holds no weights.*BundleSettings\.max_bytes"):
        confirm(bundle, *build(), torch.device("cpu"), repeat=1)


def test_inputs_above_the_limit_make_no_bundle(tmp_path: Path) -> None:
    said = Witness().write(tmp_path, max_bytes=10)
    assert "more than the 10 of BundleSettings.max_bytes" in said["bundle_failed"]
    assert said["bundle_expected"] == "", "nobody is to wait for it"
    assert list(tmp_path.rglob(BUNDLE_NAME)) == []


def trusted_checkpoint(root: Path, model: torch.nn.Module) -> CheckpointRef:
    """A trusted checkpoint with the weights of `model`."""
    storage, name = open_storage(root.as_uri()), "step-00000008"
    entry = storage.write_stream(f"{name}/model.pt", lambda file: torch.save(model.state_dict(), file))
    manifest = CheckpointManifest(
        run_id="run",
        attempt_id="attempt",
        step=Step(8),
        world_size=1,
        weights_fingerprint=fingerprint_model(model)[0],
        files=(FileEntry(path="model.pt", bytes=entry.bytes, sha256=entry.sha256),),
    )
    storage.write_once(f"{name}/manifest.json", canonical_bytes(manifest))
    identity = sha256_hex(manifest)
    mark = TrustMark(manifest_sha256=identity, step=Step(8), clean_through=Step(8))
    storage.write_once(f"{name}/trusted.json", canonical_bytes(mark))
    return CheckpointRef(uri=f"{root.as_uri()}/{name}", step=Step(8), manifest_sha256=identity)


def test_weights_that_a_trusted_checkpoint_holds_are_not_written_again(tmp_path: Path) -> None:
    witness = Witness()
    store = SimpleNamespace(newest_trusted=trusted_checkpoint(tmp_path, witness.model), root_uri=tmp_path.as_uri())
    bundle = open_bundle(witness.write("", store=store)["bundle_uri"])
    assert bundle.manifest.weights.kind == "checkpoint"
    assert confirm(bundle, *build(), torch.device("cpu"), repeat=2).differing == 0
    (tmp_path / "step-00000008" / "model.pt").write_bytes(b"other")
    with pytest.raises(BundleError, match="damaged"):
        confirm(bundle, *build(), torch.device("cpu"), repeat=1)


def test_weights_that_moved_on_since_the_checkpoint_are_written(tmp_path: Path) -> None:
    witness = Witness()
    store = SimpleNamespace(newest_trusted=trusted_checkpoint(tmp_path, build()[0]), root_uri=tmp_path.as_uri())
    assert open_bundle(witness.write("", store=store)["bundle_uri"]).manifest.weights.kind == "file"


def test_without_a_place_the_evidence_says_so() -> None:
    said = Witness().write("")
    assert "TRUESTEP_CHECKPOINT_ROOT" in said["bundle_failed"]
    assert said["bundle_expected"] == ""


def test_a_storage_that_cannot_be_written_to_costs_the_bundle_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = Witness().write(tmp_path / "file")
    assert said["bundle_failed"].startswith("StorageError")
    assert said["bundle_expected"] == ""


@pytest.mark.parametrize("written", ["uri", "path"])
def test_a_storage_that_hangs_costs_its_time_only_and_the_bundle_comes_where_the_alarm_expects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    release = threading.Event()
    opened = open_storage(tmp_path.as_uri())

    def hangs(_uri: str) -> Any:
        release.wait(30)
        return opened

    monkeypatch.setattr(writing, "open_storage", hangs)
    began = time.monotonic()
    root = f"{tmp_path.as_uri()}/" if written == "uri" else f"{tmp_path}/"
    said = Witness().write(root, timeout_seconds=0.2)
    took = time.monotonic() - began
    assert "not written within 0.2 s" in said["bundle_failed"]
    assert took < 20
    writers = [thread for thread in threading.enumerate() if thread.name == "truestep-bundle"]
    release.set()
    for writer in writers:
        writer.join(30)
    monkeypatch.undo()
    assert open_bundle(said["bundle_expected"]).manifest.alarm_id == ALARM


def test_a_rank_that_never_hears_of_the_writers_end_says_where_the_bundle_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> bytes:
        raise ConnectionError("rank 1 is gone")

    monkeypatch.setattr(_OneRank, "broadcast_bytes", gone)
    said = Witness().write(tmp_path)
    assert "rank 1 is gone" in said["bundle_failed"]
    assert open_bundle(said["bundle_expected"]).manifest.alarm_id == ALARM


def test_a_bundle_half_written_has_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    witness = Witness()
    failing = witness.failing()
    monkeypatch.setattr(torch, "save", full)
    assert "No space left" in witness.write(tmp_path, failing=failing)["bundle_failed"]
    assert (tmp_path / "bundles" / ALARM / "inputs.pt").exists()
    assert list(tmp_path.rglob(BUNDLE_NAME)) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"model": "no-colon"},
        {"model": "__main__:build"},
        {"max_bytes": 0},
        {"timeout_seconds": 0},
        {"timeout_seconds": 999},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model|max_bytes|timeout_seconds"):
        BundleSettings(**bad)


def audited(nodes: int, wrong: set[int], arbiters: int = 2) -> tuple[AuditEvidence, Verdict]:
    """An audit over a ring in which the ranks in `wrong` compute everything wrongly, each in its own way."""
    recorded = {
        Rank(rank): Recorded(rank=Rank(rank), node=NodeName(f"n{rank}"), inputs="i", result=_result(rank, rank, wrong))
        for rank in range(nodes)
    }
    ring = [
        Replayed(
            producer=Rank((rank + 1) % nodes),
            replayer=Rank(rank),
            inputs="i",
            result=_result((rank + 1) % nodes, rank, wrong),
        )
        for rank in range(nodes)
    ]
    evidence = AuditEvidence(recorded=recorded, ring=ring)
    arbitration = [
        Replayed(producer=edge.producer, replayer=Rank(rank), inputs="i", result=_result(edge.producer, rank, wrong))
        for edge in mismatching_edges(recorded, ring)
        for rank in [r for r in range(nodes) if r not in (edge.producer, edge.replayer)][:arbiters]
    ]
    evidence = AuditEvidence(recorded=recorded, ring=ring, arbitration=arbitration)
    verdict = judge_audit(evidence)
    assert verdict is not None
    return evidence, verdict


def _result(producer: int, by: int, wrong: set[int]) -> str:
    return f"{producer} wrong by {by}" if by in wrong else f"{producer} right"


@pytest.mark.parametrize("nodes", [3, 4, 7])
def test_the_suspects_own_record_is_chosen_and_an_innocent_rank_writes_it(nodes: int) -> None:
    for faulty in range(nodes):
        evidence, verdict = audited(nodes, {faulty})
        chosen = choose_pass(evidence, mismatching_edges(evidence.recorded, evidence.ring), verdict)
        assert chosen is not None
        assert verdict.suspects == (faulty,)
        assert chosen.producer == faulty
        assert chosen.writer != faulty
        assert chosen.reference not in (None, faulty)
        assert chosen.writer in chosen.parties


def test_two_nodes_settle_nothing_and_still_write() -> None:
    evidence, verdict = audited(2, {1})
    chosen = choose_pass(evidence, mismatching_edges(evidence.recorded, evidence.ring), verdict)
    assert verdict.kind is VerdictKind.AMBIGUOUS
    assert chosen is not None
    assert chosen.reference is None
    assert chosen.writer in (0, 1)


def test_unequal_inputs_are_no_computation_to_repeat() -> None:
    evidence, _ = audited(3, {1})
    verdict = Verdict(kind=VerdictKind.INPUTS, reason="r")
    assert choose_pass(evidence, mismatching_edges(evidence.recorded, evidence.ring), verdict) is None


def test_the_marker_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    Witness().write(tmp_path)
    document = json.loads((tmp_path / "bundles" / ALARM / BUNDLE_NAME).read_text())
    assert document["producer"] == 0
    assert document["weights"]["kind"] == "file"


ENDS_WITH_A_LATE_BUNDLE = """
import sys, threading, torch
from pathlib import Path
from tests.unit.bundle import computation
from tests.unit.custody.events import RUN, an_alarm, identity
from truestep import group_lifetime
from truestep.report import EventReporter, HoldSettings, Outbox, report_sdc

root, pass_takes, end = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
group_lifetime.AT_MOST_SECONDS = 20.0 if pass_takes == "many calls" else 0.05

def squared(model, batch):
    if threading.current_thread().name == "truestep-bundle":
        side, times = (200, 100_000) if pass_takes == "many calls" else (3000, 50)
        a = torch.rand(side, side)
        for _ in range(times):
            a = a @ a.tanh()
    return original(model, batch)

original, computation.squared = computation.squared, squared
witness = computation.Witness()
said = witness.write(root / "checkpoints", timeout_seconds=0.3)
print(said["bundle_failed"], flush=True)
assert "truestep-bundle" in [thread.name for thread in threading.enumerate()]
if end == "76":
    reporter = EventReporter(identity(), RUN, Outbox(root / "outbox"), None)
    report_sdc(an_alarm(run=RUN), reporter=reporter, settings=HoldSettings(timeout_seconds=0), environ={})
if end == "1":
    raise ValueError("the user's own")
sys.exit(int(end))
"""


@pytest.mark.parametrize(
    ("pass_takes", "end"), [("many calls", "0"), ("long calls", "5"), ("many calls", "1"), ("long calls", "76")]
)
def test_a_process_ends_soon_and_with_its_exit_code_though_a_bundle_is_still_computed(
    tmp_path: Path, pass_takes: str, end: str
) -> None:
    """torch aborts the process where Python ends a thread inside one of its calls."""
    command = [sys.executable, "-c", ENDS_WITH_A_LATE_BUNDLE, str(tmp_path), pass_takes, end]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert "not written within 0.3 s" in ended.stdout, ended.stderr
    assert (ended.returncode, "terminate called" in ended.stderr) == (int(end), False), ended.stderr
