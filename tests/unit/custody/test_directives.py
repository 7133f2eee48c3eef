"""Directives, tombstones, revocations and banned GPUs: where a run may start, and where it must not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.unit.custody.events import accusing_nobody, an_alarm
from truestep.attachment import BannedGpuError
from truestep.checkpoints import NoUsableCheckpointError, TombstoneError, Trust, list_checkpoints
from truestep.checkpoints.catalogue import remove_checkpoint
from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.checkpoints.storage import open_storage
from truestep.contract import (
    CheckpointRef,
    ContractError,
    ResumeDirective,
    RevocationMark,
    Step,
    Tombstone,
    UnknownVersionError,
    VerdictKind,
    canonical_bytes,
    directive_sha256,
    to_json,
)
from truestep.directives import read_directive
from truestep.protocols import ResumePoint
from truestep.report import EXIT_HOLD_EXPIRED, EXIT_NOBODY_ACCUSED, HoldSettings, report_sdc
from truestep.resumption import make_plan, resume

LATER = "2026-11-20T05:00:00+00:00"
ALARM_AT = "2026-11-20T03:00:00+00:00"
EARLIER = "2026-11-20T01:00:00+00:00"
ALARM, ANOTHER_ALARM = "ab" * 16, "cd" * 16


def order(ref: CheckpointRef, **changes: Any) -> ResumeDirective:
    fields = {
        "incident_id": "inc-1",
        "checkpoint_uri": ref.uri,
        "manifest_sha256": ref.manifest_sha256,
        "max_step": ref.step,
        "answers_alarm_ids": (ALARM,),
        "issued_at": LATER,
    }
    return ResumeDirective(**{**fields, **changes})


def trusted_run(start: Any, root_uri: str, steps: tuple[int, ...] = (4, 9, 14)) -> list[CheckpointRef]:
    run = start(root_uri)
    refs = []
    for step in steps:
        run.train(1)
        refs.append(run.save(step))
    run.checkpoints.promote(Step(max(steps)))
    return refs


def revoke(root_uri: str, ref: CheckpointRef) -> None:
    mark = RevocationMark(
        manifest_sha256=ref.manifest_sha256, step=ref.step, incident_id="inc-0", reason="inside the suspect window"
    )
    open_storage(root_uri).replace(f"{ref.uri.rsplit('/', 1)[1]}/revoked.json", canonical_bytes(mark))


def bury(root_uri: str, at: str = ALARM_AT, alarm_id: str = ALARM) -> None:
    tombstone = Tombstone(alarm_id=alarm_id, step=Step(17), run_id="run", attempt_id="a", at=at)
    open_storage(root_uri).replace("tombstone.json", canonical_bytes(tombstone))


def test_a_directive_orders_exactly_its_checkpoint_although_newer_trusted_ones_exist(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    run = start(root_uri)
    directive = order(refs[1], incident_id="inc-0123456789abcdef")
    point = resume(run.attachment, run.checkpoints, directive=directive)
    assert (point.checkpoint, point.start_step, point.incident_id) == (refs[1], 10, "inc-0123456789abcdef")
    said = run.events()[-1].detail
    assert (said["incident_id"], said["directive_sha256"]) == (point.incident_id, directive_sha256(directive))


def test_a_manifest_with_another_hash_is_refused_and_the_next_older_trusted_one_is_used(
    start: Any, root_uri: str
) -> None:
    refs = trusted_run(start, root_uri)
    run = start(root_uri)
    point = resume(run.attachment, run.checkpoints, directive=order(refs[1], manifest_sha256="0" * 64))
    assert point.checkpoint == refs[1], "at max_step, and trusted, although not the ordered bytes"
    assert "the directive orders 000000000000" in point.skipped[0]


def test_a_revoked_checkpoint_is_refused_even_when_ordered_and_even_when_trusted(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    revoke(root_uri, refs[1])
    assert [record.trust for record in list_checkpoints(root_uri)] == [Trust.TRUSTED, Trust.REVOKED, Trust.TRUSTED]
    run = start(root_uri)
    point = resume(run.attachment, run.checkpoints, directive=order(refs[1]))
    assert point.checkpoint == refs[0]
    assert "revoked by incident inc-0: inside the suspect window" in point.skipped[0]
    assert resume((free := start(root_uri)).attachment, free.checkpoints).checkpoint == refs[2]


def copied(root_uri: str, ref: CheckpointRef) -> str:
    """The URI of a copy below the same root, made as people do: every file, and no mark of recovery's."""
    storage, directory = open_storage(root_uri), ref.uri.rsplit("/", 1)[1]
    manifest = storage.read(f"{directory}/manifest.json")
    assert manifest is not None
    names = ["manifest.json", "trusted.json", *(entry["path"] for entry in json.loads(manifest)["files"])]
    for name in names:
        content = storage.read(f"{directory}/{name}")
        assert content is not None
        storage.replace(f"{directory}-copy/{name}", content)
    return f"{ref.uri}-copy"


@pytest.mark.parametrize("fate", ["kept", "damaged"])
def test_a_copy_of_a_revoked_checkpoint_is_refused_with_and_without_a_directive(
    start: Any, file_root: str, fate: str
) -> None:
    refs = trusted_run(start, file_root, steps=(4, 9))
    uri, storage = copied(file_root, refs[1]), open_storage(file_root)
    assert {uri, refs[1].uri} <= {one.ref.uri for one in make_plan(storage, None).candidates}
    revoke(file_root, refs[1])
    if fate == "damaged":
        storage.replace(f"{refs[1].uri.rsplit('/', 1)[1]}/manifest.json", b"{")
    plan = make_plan(storage, None)
    assert f"{uri}: a copy of {refs[1].uri}, revoked by incident inc-0: inside the suspect window" in plan.skipped
    for directive in (None, order(refs[1]), order(replace(refs[1], uri=uri))):
        assert [one.ref for one in make_plan(storage, directive).candidates] == [refs[0]]
    run = start(file_root)
    assert resume(run.attachment, run.checkpoints, directive=order(replace(refs[1], uri=uri))).checkpoint == refs[0]


def test_the_mark_of_a_removed_checkpoint_holds_for_its_copy_and_not_for_what_is_trained_again(
    start: Any, root_uri: str
) -> None:
    refs = trusted_run(start, root_uri, steps=(4, 9))
    uri = copied(root_uri, refs[1])
    revoke(root_uri, refs[1])
    remove_checkpoint(open_storage(root_uri), refs[1].uri.rsplit("/", 1)[1])
    assert [one.ref for one in make_plan(open_storage(root_uri), None).candidates] == [refs[0]]
    run = start(root_uri)
    again = run.save(9)
    run.checkpoints.promote(Step(9))
    assert again.uri not in (uri, refs[1].uri), "the mark would revoke it"
    found = {record.ref.uri: record.trust for record in list_checkpoints(root_uri)}
    assert found == {again.uri: Trust.TRUSTED, uri: Trust.REVOKED, refs[0].uri: Trust.TRUSTED}


def test_retention_after_a_rollback_counts_only_what_is_still_usable(start: Any, file_root: str) -> None:
    """The revoked checkpoints are the newest: counted, they would push out exactly the good ones."""
    refs = trusted_run(start, file_root, steps=(9, 19, 29, 39, 49, 59))
    for ref in refs[2:]:
        revoke(file_root, ref)
    unreadable = Path(urlsplit(refs[3].uri).path) / "manifest.json"
    unreadable.write_bytes(b"{")

    run = start(file_root, keep=3)
    point = resume(run.attachment, run.checkpoints, directive=order(refs[1]))
    assert point.checkpoint == refs[1]
    run.save(29)
    run.checkpoints.promote(Step(29))
    kept = [(record.ref.step, record.trust) for record in list_checkpoints(file_root)]
    assert [step for step, trust in kept if trust is Trust.TRUSTED] == [29, 19, 9], kept

    for step in (69, 79, 89):
        run.save(step)
    run.checkpoints.promote(Step(89))
    kept = [(record.ref.step, record.trust) for record in list_checkpoints(file_root)]
    assert kept == [(step, Trust.TRUSTED) for step in (89, 79, 69)], "what is older goes, revoked or not"


def test_nothing_above_max_step_is_used_and_nothing_at_all_is_an_error_with_every_reason(
    start: Any, root_uri: str
) -> None:
    refs = trusted_run(start, root_uri, steps=(9, 14))
    run = start(root_uri)
    with pytest.raises(NoUsableCheckpointError) as raised:
        resume(run.attachment, run.checkpoints, directive=order(refs[0], max_step=Step(3)))
    assert "incident inc-1" in str(raised.value)
    assert "above max_step 3" in str(raised.value)
    assert run.attachment.resumed is None


def test_a_checkpoint_that_is_gone_is_said_and_an_older_one_used(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    run = start(root_uri)
    gone = order(refs[1], checkpoint_uri=f"{root_uri}/step-00000012", manifest_sha256="1" * 64, max_step=Step(12))
    point = resume(run.attachment, run.checkpoints, directive=gone)
    assert point.checkpoint == refs[1]
    assert "does not exist" in point.skipped[0]


def test_a_restart_under_the_same_directive_goes_on_from_what_was_trained_since(start: Any, root_uri: str) -> None:
    """The directive stays mounted after the recovery: a later crash must not throw away what was trained since."""
    refs = trusted_run(start, root_uri)
    directive = order(refs[0])
    first = start(root_uri)
    resume(first.attachment, first.checkpoints, directive=directive)
    first.train(3)
    descendant = first.save(9)
    first.checkpoints.promote(Step(9))
    manifest = next(each.manifest for each in list_checkpoints(root_uri) if each.ref == descendant)
    assert manifest is not None
    assert (manifest.ordered, manifest.answers_alarm_ids) == (refs[0], (ALARM,))
    reported = [event.detail for event in first.events() if event.detail["checkpoint"] == to_json(descendant)]
    assert [(each["ordered"], each["answers_alarm_ids"]) for each in reported] == [(to_json(refs[0]), [ALARM])] * 2

    second = start(root_uri)
    assert resume(second.attachment, second.checkpoints, directive=directive).checkpoint == descendant
    third = start(root_uri)
    issued_again = order(refs[0], issued_at="2026-11-21T05:00:00+00:00")
    assert resume(third.attachment, third.checkpoints, directive=issued_again).checkpoint == refs[0]


def test_a_tombstone_stops_every_start_until_a_directive_answers_its_alarm(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    bury(root_uri)
    for directive in (
        None,
        order(refs[0], answers_alarm_ids=()),
        order(refs[0], answers_alarm_ids=(ANOTHER_ALARM, "ef" * 16)),
    ):
        run = start(root_uri)
        with pytest.raises(
            TombstoneError, match=r"alarm (ab){16} at step 17.*start-from (file|s3):.*remove .*tombstone\.json"
        ):
            resume(run.attachment, run.checkpoints, directive=directive)
    run = start(root_uri)
    assert resume(run.attachment, run.checkpoints, directive=order(refs[0])).checkpoint == refs[0]


def test_a_run_that_ended_over_an_alarm_that_accuses_nobody_starts_again_by_itself(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    ended = start(root_uri)
    resume(ended.attachment, ended.checkpoints)
    alarm = accusing_nobody(VerdictKind.NUMERICS, run=ended.checkpoints.reporter.run)
    with pytest.raises(SystemExit) as end:
        report_sdc(alarm, reporter=ended.checkpoints.reporter)
    assert end.value.code == EXIT_NOBODY_ACCUSED
    again = start(root_uri)
    assert resume(again.attachment, again.checkpoints).checkpoint == refs[-1]


def test_a_run_that_held_after_an_accusing_alarm_does_not_start_again_without_a_directive(
    start: Any, root_uri: str
) -> None:
    refs = trusted_run(start, root_uri)
    ended = start(root_uri)
    resume(ended.attachment, ended.checkpoints)
    alarm = an_alarm(run=ended.checkpoints.reporter.run)
    with pytest.raises(SystemExit) as end:
        report_sdc(alarm, reporter=ended.checkpoints.reporter, settings=HoldSettings(timeout_seconds=0.01))
    assert end.value.code == EXIT_HOLD_EXPIRED
    again = start(root_uri)
    with pytest.raises(TombstoneError, match=alarm.alarm_id):
        resume(again.attachment, again.checkpoints)
    ordered = start(root_uri)
    directive = order(refs[1], answers_alarm_ids=(alarm.alarm_id,))
    assert resume(ordered.attachment, ordered.checkpoints, directive=directive).checkpoint == refs[1]


def test_a_tombstone_that_a_directive_answered_is_kept_aside_and_stops_nobody_any_more(
    start: Any, root_uri: str
) -> None:
    refs = trusted_run(start, root_uri)
    bury(root_uri)
    resume((run := start(root_uri)).attachment, run.checkpoints, directive=order(refs[2]))
    assert open_storage(root_uri).read("tombstone.json") is None
    assert open_storage(root_uri).read(f"tombstones/{'ab' * 16}.json") is not None
    assert resume((later := start(root_uri)).attachment, later.checkpoints).checkpoint == refs[2]


def mount(path: Path, directive: ResumeDirective, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(canonical_bytes(directive))
    monkeypatch.setenv("TRUESTEP_DIRECTIVE", str(path))


@pytest.mark.parametrize("at", [EARLIER, LATER, "9999-12-31T23:59:59+00:00", "no time at all"])
def test_what_a_directive_answers_depends_on_no_clock(
    start: Any, root_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The trainer's clock is in the tombstone, the recovery's in the directive: they may differ either way."""
    refs = trusted_run(start, root_uri)
    path = tmp_path / "resume.json"
    mount(path, order(refs[2]), monkeypatch)
    bury(root_uri, at=at)
    assert restarted(start, root_uri).checkpoint == refs[2]
    for followed in (True, False):  # an alarm of a later run, and the directive of the earlier one still lies there
        mount(path, order(refs[2], issued_at=LATER if followed else "2026-11-20T05:00:01+00:00"), monkeypatch)
        bury(root_uri, at=at, alarm_id=ANOTHER_ALARM)
        with pytest.raises(TombstoneError, match=f"of inc-1 answers alarm {ALARM}, not alarm {ANOTHER_ALARM}: let the"):
            restarted(start, root_uri)
    mount(path, order(refs[0], incident_id="inc-2", answers_alarm_ids=(ANOTHER_ALARM,)), monkeypatch)
    assert restarted(start, root_uri).checkpoint == refs[0]


def restarted(start: Any, root_uri: str) -> ResumePoint:
    run = start(root_uri)
    return resume(run.attachment, run.checkpoints)


def test_a_start_that_ends_between_following_and_the_tombstones_end_can_be_repeated(
    start: Any, root_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = trusted_run(start, root_uri)
    mount(tmp_path / "resume.json", order(refs[1]), monkeypatch)
    for _ in range(2):
        bury(root_uri)
        run = start(root_uri)
        assert resume(run.attachment, run.checkpoints).checkpoint == refs[1]


def test_a_tombstone_that_cannot_be_read_still_stops_the_start(start: Any, root_uri: str) -> None:
    trusted_run(start, root_uri)
    open_storage(root_uri).replace("tombstone.json", b"{")
    run = start(root_uri)
    removing = r"tombstone\.json cannot be read: .* then remove (file|s3):.*/tombstone\.json\. The next start follows"
    with pytest.raises(CheckpointCorruptError, match=removing):
        resume(run.attachment, run.checkpoints)


def test_a_banned_gpu_is_refused_by_rank_node_and_uuid(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    run = start(root_uri)
    uuid = run.attachment.identities[0].gpu_uuid
    with pytest.raises(BannedGpuError, match=rf"inc-1 bans .* rank 0 on node-a has {uuid}"):
        resume(run.attachment, run.checkpoints, directive=order(refs[0], banned_gpu_uuids=(uuid,)))
    other = start(root_uri)
    resume(other.attachment, other.checkpoints, directive=order(refs[0], banned_gpu_uuids=("GPU-another",)))


def test_a_trust_mark_for_another_manifest_does_not_count(start: Any, file_root: str) -> None:
    refs = trusted_run(start, file_root, steps=(4, 9))
    root = Path(urlsplit(file_root).path)
    (root / "step-00000009" / "trusted.json").write_bytes((root / "step-00000004" / "trusted.json").read_bytes())
    assert [record.trust for record in list_checkpoints(file_root)] == [Trust.UNREADABLE, Trust.TRUSTED]
    run = start(file_root)
    point = resume(run.attachment, run.checkpoints)
    assert point.checkpoint == refs[0]
    assert "another manifest" in point.skipped[0]


def test_no_file_is_no_directive(tmp_path: Path) -> None:
    assert read_directive({"TRUESTEP_DIRECTIVE": str(tmp_path / "resume.json")}) is None


def test_the_directive_is_read_from_where_the_environment_says(start: Any, file_root: str, tmp_path: Path) -> None:
    refs = trusted_run(start, file_root)
    path = tmp_path / "resume.json"
    path.write_bytes(canonical_bytes(order(refs[0])))
    assert read_directive({"TRUESTEP_DIRECTIVE": str(path)}) == order(refs[0])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 1}', json.dumps({"schema_version": 1, "incident_id": 3})]
)
def test_a_directive_that_cannot_be_understood_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "resume.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=rf"{path}.*ConfigMap"):
        read_directive({"TRUESTEP_DIRECTIVE": str(path)})


def test_a_directive_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "resume.json"
    path.write_text('{"schema_version": 2}')
    with pytest.raises(UnknownVersionError, match="same truestep release"):
        read_directive({"TRUESTEP_DIRECTIVE": str(path)})


def test_the_identity_of_a_checkpoint_is_the_hash_of_its_manifests_bytes(start: Any, root_uri: str) -> None:
    (ref,) = trusted_run(start, root_uri, steps=(4,))
    content = open_storage(root_uri).read("step-00000004/manifest.json")
    assert content is not None
    assert hashlib.sha256(content).hexdigest() == ref.manifest_sha256
