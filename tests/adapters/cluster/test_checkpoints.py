"""Checkpoints in S3: what is trusted, what is revoked, and the state that chooses among them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from lambdas.adapters.checkpoints import CheckpointCatalogue, CheckpointRootError
from lambdas.domain.checkpoint_choice import Candidate, ManifestState
from lambdas.domain.cluster_relaunch import newly_ordered
from lambdas.domain.errors import SettingsError
from lambdas.domain.incident import job_of
from lambdas.ports import RecordedCheckpoint
from tests.adapters.cluster.incidents import Recovery
from truestep.contract import (
    CheckpointEvent,
    CheckpointManifest,
    CheckpointRef,
    FileEntry,
    ResumeDirective,
    RunRef,
    Step,
    TrustMark,
    canonical_bytes,
    directive_sha256,
    ordered_checkpoint,
)


class Storage:
    """Writes checkpoints as training does."""

    def __init__(self, s3: Any, bucket: str) -> None:
        self.s3 = s3
        self.bucket = bucket
        self.root = f"s3://{bucket}/run-1"

    def put(self, key: str, body: bytes) -> None:
        self.s3.put_object(Bucket=self.bucket, Key=f"run-1/{key}", Body=body)

    def names(self) -> set[str]:
        listed = self.s3.list_objects_v2(Bucket=self.bucket, Prefix="run-1/").get("Contents", [])
        return {entry["Key"].removeprefix("run-1/") for entry in listed}

    def write(
        self,
        step: int,
        *,
        trusted: bool = True,
        suffix: str = "",
        run_id: str = "run-1",
        at: str = "",
        order: ResumeDirective | None = None,
    ) -> CheckpointRef:
        """order: under which the saving attempt had resumed."""
        folder = f"step-{step:08d}{suffix}"
        body = f"weights of {folder}".encode()
        entry = FileEntry(path="model.pt", bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        manifest = canonical_bytes(
            CheckpointManifest(
                run_id=run_id,
                attempt_id="attempt-1",
                step=Step(step),
                world_size=2,
                weights_fingerprint="v1:0",
                files=(entry,),
                created_at=at,
                directive_sha256=directive_sha256(order) if order else "",
                ordered=ordered_checkpoint(order) if order else None,
                answers_alarm_ids=order.answers_alarm_ids if order else (),
            )
        )
        ref = CheckpointRef(
            uri=f"{self.root}/{folder}", step=Step(step), manifest_sha256=hashlib.sha256(manifest).hexdigest()
        )
        self.put(f"{folder}/model.pt", body)
        self.put(f"{folder}/manifest.json", manifest)
        if trusted:
            self.trust(ref)
        return ref

    def trust(self, ref: CheckpointRef) -> None:
        mark = TrustMark(manifest_sha256=ref.manifest_sha256, step=ref.step, clean_through=ref.step)
        self.put(f"{ref.uri.rsplit('/', 1)[1]}/trusted.json", canonical_bytes(mark))


@pytest.fixture
def storage(s3: Any, bucket: str) -> Storage:
    return Storage(s3, bucket)


@pytest.fixture
def catalogue(s3: Any, bucket: str) -> CheckpointCatalogue:
    return CheckpointCatalogue(s3, [bucket])


def recorded(ref: CheckpointRef, trust: str = "trusted", at: str = "") -> RecordedCheckpoint:
    run = RunRef(run_id="run-1", attempt_id="a", world_size=2)
    return RecordedCheckpoint(
        event=CheckpointEvent(run=run, checkpoint=ref, weights_fingerprint="v1:0", at=at), trust=trust
    )


def by_step(candidates: tuple[Candidate, ...]) -> dict[int, Candidate]:
    return {entry.checkpoint.step: entry for entry in candidates}


def test_the_marks_beside_the_manifest_decide(catalogue: CheckpointCatalogue, storage: Storage) -> None:
    refs = {step: storage.write(step, trusted=step != 29) for step in (9, 19, 29, 39)}
    assert catalogue.revoke(refs[39], incident_id="inc-1", reason="suspect window", at="t")
    # An event cannot make a checkpoint trusted whose mark is missing.
    found = by_step(catalogue.candidates(storage.root, [recorded(refs[29])]))
    assert [found[step].trusted for step in (9, 19, 29)] == [True, True, False]
    assert found[39].revoked_by == "inc-1"
    assert all(entry.manifest is ManifestState.VERIFIED for entry in found.values())
    assert {step: entry.checkpoint for step, entry in found.items()} == refs


def test_a_file_of_brackets_without_an_end_is_damage_and_stops_no_choice(
    catalogue: CheckpointCatalogue, storage: Storage
) -> None:
    refs = {step: storage.write(step) for step in (9, 19, 29)}
    for name in ("step-00000019/trusted.json", "step-00000029/manifest.json"):
        storage.put(name, b"[" * 100_000)
    found = by_step(catalogue.candidates(storage.root, []))
    assert (found[9].trusted, found[9].checkpoint) == (True, refs[9])
    assert (found[19].trusted, found[29].manifest) == (False, ManifestState.UNREADABLE)
    assert "too deep" in found[19].detail
    assert "too deep" in found[29].detail


def test_a_save_without_a_manifest_is_no_checkpoint_yet(catalogue: CheckpointCatalogue, storage: Storage) -> None:
    storage.put("step-00000009/model.pt", b"half")
    assert catalogue.candidates(storage.root, []) == ()


def test_a_manifest_that_changed_after_it_was_trusted_is_different(
    catalogue: CheckpointCatalogue, storage: Storage
) -> None:
    ref = storage.write(9)
    manifest = storage.s3.get_object(Bucket=storage.bucket, Key="run-1/step-00000009/manifest.json")["Body"].read()
    storage.put("step-00000009/manifest.json", manifest.replace(b"v1:0", b"v1:1"))
    (found,) = catalogue.candidates(storage.root, [])
    assert found.manifest is ManifestState.DIFFERENT
    assert "changed" in catalogue.missing_files(ref)


@pytest.mark.parametrize("body", [b"not JSON", b"{}", b"[]"])
def test_a_manifest_that_cannot_be_read_is_listed_as_such(
    catalogue: CheckpointCatalogue, storage: Storage, body: bytes
) -> None:
    storage.put("step-00000009/manifest.json", body)
    (found,) = catalogue.candidates(storage.root, [])
    assert found.manifest is ManifestState.UNREADABLE
    assert not found.trusted
    assert found.detail


@pytest.mark.parametrize("fate", ["kept", "removed", "damaged", "mark lost"])
def test_a_copy_of_a_revoked_checkpoint_is_not_chosen_whatever_became_of_the_original(
    recovery: Recovery, storage: Storage, fate: str
) -> None:
    """Copied before the revocation; a later incident finds the step outside its own window."""
    older, original = storage.write(9), storage.write(99)
    folder, copy = "step-00000099", "step-00000099-copy"
    for name in ("model.pt", "manifest.json", "trusted.json"):
        source = {"Bucket": storage.bucket, "Key": f"run-1/{folder}/{name}"}
        storage.s3.copy_object(Bucket=storage.bucket, Key=f"run-1/{copy}/{name}", CopySource=source)
    incident = recovery.open()
    catalogue = CheckpointCatalogue(storage.s3, [storage.bucket])
    catalogue.revoke(original, incident_id="inc-1", reason="suspect window", at="t")
    by_whom = "incident inc-1"
    if fate == "removed":
        for name in ("trusted.json", "manifest.json", "model.pt"):
            storage.s3.delete_object(Bucket=storage.bucket, Key=f"run-1/{folder}/{name}")
    elif fate == "damaged":
        storage.put(f"{folder}/manifest.json", b"{")
    elif fate == "mark lost":
        recovery.store.record_checkpoint(job_of(incident.alarm), recorded(original).event, "revoked")
        storage.s3.delete_object(Bucket=storage.bucket, Key=f"run-1/{folder}/revoked.json")
        by_whom = "an earlier decision"
    assert recovery.run("choose_checkpoint", incident.incident_id)["outcome"] == "chosen"
    chosen = recovery.load(incident.incident_id).checkpoint
    assert chosen is not None
    assert chosen.checkpoint == older
    sentence = f"{storage.root}/{copy} is a copy of {original.uri}, revoked by {by_whom}"
    assert any(sentence in refused for refused in chosen.refused), chosen.refused


def test_a_revocation_that_cannot_be_read_still_revokes(catalogue: CheckpointCatalogue, storage: Storage) -> None:
    storage.write(9)
    storage.put("step-00000009/revoked.json", b"garbage")
    (found,) = catalogue.candidates(storage.root, [])
    assert found.revoked_by


def test_a_revocation_is_written_once(catalogue: CheckpointCatalogue, storage: Storage) -> None:
    ref = storage.write(9)
    assert catalogue.revoke(ref, incident_id="inc-1", reason="first", at="t1")
    assert catalogue.revoke(ref, incident_id="inc-2", reason="second", at="t2")
    body = storage.s3.get_object(Bucket=storage.bucket, Key="run-1/step-00000009/revoked.json")["Body"].read()
    assert json.loads(body)["incident_id"] == "inc-1"


def test_missing_and_short_files_are_named(catalogue: CheckpointCatalogue, storage: Storage) -> None:
    ref = storage.write(9)
    assert catalogue.missing_files(ref) == ""
    storage.put("step-00000009/model.pt", b"short")
    assert "model.pt (5 instead of" in catalogue.missing_files(ref)
    storage.s3.delete_object(Bucket=storage.bucket, Key="run-1/step-00000009/model.pt")
    assert "model.pt (missing instead of" in catalogue.missing_files(ref)


def test_a_checkpoint_that_only_an_event_knows_is_missing(catalogue: CheckpointCatalogue, storage: Storage) -> None:
    ref = CheckpointRef(uri=f"{storage.root}/step-00000009", step=Step(9), manifest_sha256="ab" * 32)
    (found,) = catalogue.candidates(storage.root, [recorded(ref)])
    assert found.manifest is ManifestState.MISSING
    assert not found.trusted


def test_on_a_file_system_out_of_reach_the_events_are_the_source(catalogue: CheckpointCatalogue) -> None:
    def ref(step: int, sha: str = "ab") -> CheckpointRef:
        return CheckpointRef(uri=f"file:///fsx/run/step-{step:08d}", step=Step(step), manifest_sha256=sha * 32)

    events = [recorded(ref(9)), recorded(ref(19), "written"), recorded(ref(29), "revoked")]
    events += [recorded(ref(39, "cd"), at="2026-01-01"), recorded(ref(39, "ef"), at="2026-01-02")]
    found = catalogue.candidates("file:///fsx/run", events)
    assert [(entry.checkpoint.step, entry.trusted, bool(entry.revoked_by)) for entry in found[2:]] == [
        (29, False, True),
        (19, False, False),
        (9, True, False),
    ]
    assert [entry.manifest for entry in found[:2]] == [ManifestState.OUT_OF_REACH, ManifestState.DIFFERENT]
    assert not catalogue.revoke(ref(9), incident_id="inc-1", reason="", at="")


def test_a_root_or_bucket_that_cannot_be_read_says_what_to_set(s3: Any, bucket: str) -> None:
    catalogue = CheckpointCatalogue(s3, [f"{bucket}/team-a"])
    for root in ("", "https://b/run", "s3://b]/run"):
        with pytest.raises(CheckpointRootError, match="TRUESTEP_CHECKPOINT_ROOT"):
            catalogue.candidates(root, [])
    with pytest.raises(SettingsError, match="add the bucket"):
        catalogue.candidates(f"s3://{bucket}/team-ab/run", [])
    assert catalogue.candidates(f"s3://{bucket}/team-a/run", []) == ()


def test_the_state_chooses_before_the_suspect_window_and_revokes_inside_it(
    recovery: Recovery, storage: Storage
) -> None:
    refs = {step: storage.write(step) for step in (89, 99, 109, 119)}
    retrained = storage.write(99, suffix="-attempt2", at="2026-01-02T00:00:00Z")
    storage.put("step-00000109/model.pt", b"truncated")
    incident = recovery.open()
    answer = recovery.run("choose_checkpoint", incident.incident_id)
    assert answer["outcome"] == "chosen", answer
    choice = recovery.load(incident.incident_id).checkpoint
    assert choice is not None
    assert choice.checkpoint == retrained
    assert choice.lost_steps == 120 - 99
    assert any("incomplete" in sentence for sentence in choice.refused)
    assert any("suspect window" in sentence for sentence in choice.refused)
    assert {key for key in storage.names() if key.endswith("revoked.json")} == {"step-00000119/revoked.json"}
    trust = {entry.event.checkpoint: entry.trust for entry in recovery.store.checkpoints(job_of(incident.alarm))}
    assert trust == {refs[119]: "revoked"}
    assert recovery.run("choose_checkpoint", incident.incident_id)["outcome"] == "chosen"
    again = recovery.load(incident.incident_id).checkpoint
    assert again is not None
    assert again.checkpoint == retrained


def test_the_policys_margin_is_taken_off_the_clean_step(
    recovery: Recovery, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"assumed_hit_probability": 0.5, "audit_interval_steps": 10}
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps(policy))
    for step in (79, 89, 99, 109):
        storage.write(step)
    incident = recovery.open()
    assert recovery.run("choose_checkpoint", incident.incident_id)["outcome"] == "chosen"
    choice = recovery.load(incident.incident_id).checkpoint
    assert choice is not None
    # 10 * ln(0.05) / (2 ln 0.5) = 21.6 steps before step 110.
    assert (choice.margin_steps, choice.checkpoint.step) == (22, 79)
    assert not [name for name in storage.names() if name.endswith("revoked.json")], "a margin alone revokes nothing"


def test_a_rejected_accusation_revokes_nothing(recovery: Recovery, storage: Storage) -> None:
    for step in (99, 119):
        storage.write(step)
    before = storage.names()
    incident = recovery.open(approved=False)
    assert recovery.run("choose_checkpoint", incident.incident_id)["outcome"] == "chosen"
    assert storage.names() == before
    assert recovery.store.checkpoints(job_of(incident.alarm)) == ()


def test_without_a_trusted_checkpoint_the_state_escalates_with_every_reason(
    recovery: Recovery, storage: Storage
) -> None:
    storage.write(99, trusted=False)
    storage.write(119)
    answer = recovery.run("choose_checkpoint", recovery.open().incident_id)
    assert answer["outcome"] == "escalate"
    assert "step 99: only written" in answer["reason"]
    assert "step 119: inside the suspect window" in answer["reason"]
    assert not [name for name in storage.names() if name.endswith("revoked.json")], "nothing else would be left"


def test_a_dry_run_chooses_and_revokes_nothing(recovery: Recovery, storage: Storage) -> None:
    storage.write(99)
    storage.write(119)
    before = storage.names()
    incident = recovery.open(dry_run=True)
    assert recovery.run("choose_checkpoint", incident.incident_id)["outcome"] == "chosen"
    assert storage.names() == before
    assert recovery.store.checkpoints(job_of(incident.alarm)) == ()


@pytest.mark.parametrize("on_file_system", [False, True])
def test_what_the_relaunched_run_has_trained_survives_another_choice_and_is_what_it_goes_on_from(
    recovery: Recovery, storage: Storage, on_file_system: bool
) -> None:
    """Nothing was heard of the run, so that VerifyRecovery ended; somebody goes on from an earlier state, or starts
    anew by hand: ChooseCheckpoint is entered again hours later."""
    root = "file:///fsx/run-1" if on_file_system else storage.root
    incident = recovery.open(checkpoint_root=root)
    ident = incident.incident_id

    def write(step: int, order: ResumeDirective | None = None) -> CheckpointRef:
        ref = storage.write(step, suffix="-attempt2" if order else "", order=order)
        ref = dataclasses.replace(ref, uri=ref.uri.replace(storage.root, root))
        event = CheckpointEvent(
            run=incident.alarm.run,
            checkpoint=ref,
            weights_fingerprint="v1:0",
            ordered=ordered_checkpoint(order) if order else None,
            answers_alarm_ids=order.answers_alarm_ids if order else (),
        )
        recovery.store.record_checkpoint(incident.job, event, "trusted")
        return ref

    old = [write(step) for step in (99, 119)]
    assert recovery.run("choose_checkpoint", ident)["outcome"] == "chosen"
    ordered, order = newly_ordered(
        recovery.load(ident), answers=recovery.store.alarms_of(incident), now=datetime.now(UTC)
    )
    recovery.store.save(ordered)
    again = [write(step, order) for step in (119, 2119, 5119)]
    assert recovery.run("choose_checkpoint", ident)["outcome"] == "chosen"
    trust = {entry.event.checkpoint: entry.trust for entry in recovery.store.checkpoints(incident.job)}
    assert trust == {old[0]: "trusted", old[1]: "revoked", **dict.fromkeys(again, "trusted")}
    revoked = {name for name in storage.names() if name.endswith("revoked.json")}
    assert revoked == (set() if on_file_system else {"step-00000119/revoked.json"})
    choice = recovery.load(ident).checkpoint
    assert choice is not None
    assert (choice.checkpoint, choice.lost_steps) == (again[2], 0)
