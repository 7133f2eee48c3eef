"""Orders by hand: what they answer, what ends them, and that no clock decides between them and the recovery."""

from __future__ import annotations

import logging
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.unit.custody.test_directives import order, revoke, trusted_run
from truestep.checkpoints import CheckpointError, TombstoneError, list_checkpoints
from truestep.checkpoints.errors import ResumeError
from truestep.checkpoints.storage import open_storage
from truestep.contract import CheckpointRef, ContractError, Step, Tombstone, canonical_bytes
from truestep.directives import FOLLOWED_NAME, StartOrder, directive_in_force, order_start, read_order
from truestep.resumption import resume

NOW = datetime.now(UTC)
FIRST, SECOND = "ab" * 16, "cd" * 16


def at(hours: float) -> str:
    return (NOW + timedelta(hours=hours)).isoformat(timespec="milliseconds")


def bury(root_uri: str, alarm_id: str = FIRST, when: str = at(0)) -> None:
    tombstone = Tombstone(alarm_id=alarm_id, step=Step(17), run_id="run", attempt_id="a", at=when)
    open_storage(root_uri).replace("tombstone.json", canonical_bytes(tombstone))


def give(root_uri: str, ref: CheckpointRef, hours: float = 0) -> StartOrder:
    """As `start-from` does on a machine whose clock is so far ahead."""
    record = next(record for record in list_checkpoints(root_uri) if record.ref == ref)
    return order_start(open_storage(root_uri), record, now=NOW + timedelta(hours=hours))


def restart(start: Any, root_uri: str, *then: int) -> Any:
    """The point that a new process resumes from; it then trains, saves at these steps, and trusts the last."""
    run = start(root_uri)
    point = resume(run.attachment, run.checkpoints)
    for step in then:
        run.train(1)
        run.save(step)
        run.checkpoints.promote(Step(step))
    return point


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the recovery's directive of these tests lies, in place of the pod's mount."""
    path = tmp_path / "mounted.json"
    monkeypatch.setenv("TRUESTEP_DIRECTIVE", str(path))
    return path


def test_an_order_answers_the_alarm_and_leads_back_although_a_newer_checkpoint_is_trusted(
    start: Any, root_uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refs = trusted_run(start, root_uri)
    bury(root_uri, when="no time at all")
    given = give(root_uri, refs[1], -48)
    assert given.directive.answers_alarm_ids == (FIRST,)
    for name in (None, "truestep", "truestep.resumption"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    run = start(root_uri)
    point = resume(run.attachment, run.checkpoints)
    assert (point.checkpoint, point.start_step, point.incident_id) == (refs[1], 10, given.directive.incident_id)
    said = capsys.readouterr().err
    assert f"resumed from step 9, ordered {given.directive.incident_id}: trusted for faults" in said
    assert "First step 10" in said
    followed = read_order(open_storage(root_uri))
    assert followed is not None
    assert followed.followed_by == run.attachment.run.attempt_id
    assert datetime.fromisoformat(followed.followed_at) >= NOW
    assert restart(start, root_uri, 12).checkpoint == refs[1], "no progress yet: the order still says where"
    assert restart(start, root_uri).checkpoint.step == 12, "what was trained under the order goes on"
    assert read_order(open_storage(root_uri)) == followed, "who followed it first"


def test_an_order_from_a_clock_ahead_yields_to_the_next_alarm_and_to_the_recovery(
    start: Any, file_root: str, mounted: Path
) -> None:
    refs = trusted_run(start, file_root)
    given = give(file_root, refs[1], 26)
    assert restart(start, file_root, 30).checkpoint == refs[1]
    bury(file_root, when=at(1))
    for _ in range(2):
        with pytest.raises(
            TombstoneError, match=rf"{given.directive.incident_id} is over: it answers no alarm, .*{FIRST}"
        ):
            restart(start, file_root)
    mounted.write_bytes(canonical_bytes(order(refs[0], issued_at=at(2))))
    assert restart(start, file_root).checkpoint == refs[0]
    mounted.unlink()
    assert restart(start, file_root).checkpoint.step == 30, "ended for good, although its tombstone is gone"


def test_an_order_that_answers_an_earlier_alarm_does_not_answer_the_next(start: Any, root_uri: str) -> None:
    refs = trusted_run(start, root_uri)
    bury(root_uri)
    give(root_uri, refs[1], 26)
    bury(root_uri, SECOND, at(1))
    with pytest.raises(TombstoneError, match=rf"answers alarm {FIRST}, and alarm {SECOND} came later"):
        restart(start, root_uri)
    open_storage(root_uri).remove_file("tombstone.json")
    assert restart(start, root_uri).checkpoint == refs[2]
    give(root_uri, refs[0])
    assert restart(start, root_uri).checkpoint == refs[0], "a new order is in force again"


@pytest.mark.parametrize("hours", [-0.05, 0.05, 26])
@pytest.mark.parametrize("alarm", [False, True])
def test_an_order_and_a_directive_that_knew_nothing_of_each_other_stop_the_start(
    start: Any, file_root: str, mounted: Path, hours: float, alarm: bool
) -> None:
    refs = trusted_run(start, file_root, (4, 9))
    if alarm:
        bury(file_root, when=at(-1))
    given = give(file_root, refs[0], hours)
    mounted.write_bytes(canonical_bytes(order(refs[1], issued_at=at(0))))
    message = rf"cannot be told.*remove {file_root}/resume\.json; to follow the order by hand, remove the ConfigMap"
    with pytest.raises(ResumeError, match=message) as raised:
        restart(start, file_root)
    assert given.directive.incident_id in str(raised.value)
    assert str(mounted) in str(raised.value)
    (mounted if alarm else Path(urlsplit(file_root).path) / "resume.json").unlink()
    assert restart(start, file_root).checkpoint == refs[0 if alarm else 1]


def test_an_order_given_after_a_directive_was_followed_overrules_it_whatever_the_clocks_say(
    start: Any, file_root: str, mounted: Path
) -> None:
    refs = trusted_run(start, file_root)
    mounted.write_bytes(canonical_bytes(order(refs[2], issued_at=at(1))))
    assert restart(start, file_root).checkpoint == refs[2]
    for _ in range(2):
        given = give(file_root, refs[0], -9)
        assert restart(start, file_root, 20).incident_id == given.directive.incident_id
        assert restart(start, file_root).checkpoint.step == 20
    again = give(file_root, refs[0], -9)
    assert again.directive != given.directive
    assert restart(start, file_root).checkpoint == refs[0], "ordered anew, in the same millisecond too"


def test_a_later_directive_ends_an_order_that_was_followed_and_nothing_brings_it_back(
    start: Any, file_root: str, mounted: Path
) -> None:
    refs = trusted_run(start, file_root)
    give(file_root, refs[0], -24 * 9)
    assert restart(start, file_root, 20).checkpoint == refs[0]
    mounted.write_bytes(canonical_bytes(order(refs[1], issued_at=at(-1))))
    with pytest.raises(ResumeError, match="cannot be told"):
        restart(start, file_root)
    mounted.write_bytes(canonical_bytes(order(refs[1], issued_at=at(1))))
    assert restart(start, file_root, 100, 300).checkpoint == refs[1]
    assert restart(start, file_root).checkpoint.step == 300
    mounted.unlink()
    assert restart(start, file_root).checkpoint.step == 300
    ended = read_order(open_storage(file_root))
    assert ended is not None
    assert ended.ended.startswith("incident inc-1 ordered another start later")


def test_a_directive_of_the_script_goes_first_and_ends_an_order(start: Any, file_root: str, mounted: Path) -> None:
    refs = trusted_run(start, file_root)
    give(file_root, refs[0])
    run = start(file_root)
    assert resume(run.attachment, run.checkpoints, directive=order(refs[1])).checkpoint == refs[1]
    assert restart(start, file_root).checkpoint == refs[2]


def test_what_cannot_be_understood_is_said_with_its_file(start: Any, file_root: str, mounted: Path) -> None:
    refs = trusted_run(start, file_root, (4,))
    storage = open_storage(file_root)
    assert directive_in_force(storage) is None
    for content in (b"{", canonical_bytes(order(refs[0]))):
        storage.replace("resume.json", content)
        with pytest.raises(ContractError, match=r"resume\.json.*write it again with `truestep checkpoints start-from"):
            directive_in_force(storage)
    storage.replace("followed.json", b"[]")
    with pytest.raises(ContractError, match=r"followed\.json.*remove it"):
        give(file_root, refs[0])


def test_a_revoked_checkpoint_cannot_be_ordered(start: Any, file_root: str) -> None:
    refs = trusted_run(start, file_root, steps=(4, 9))
    revoke(file_root, refs[1])
    with pytest.raises(CheckpointError, match=r"is revoked: .*choose an older one"):
        order_start(open_storage(file_root), list_checkpoints(file_root)[0])
    assert open_storage(file_root).read("resume.json") is None


@pytest.mark.parametrize(("root_mode", "expected"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_whoever_may_read_the_root_may_read_the_order(
    start: Any, file_root: str, root_mode: int, expected: int
) -> None:
    refs = trusted_run(start, file_root, (4,))
    root = Path(urlsplit(file_root).path)
    root.chmod(root_mode)
    old = os.umask(0o077)
    try:
        give(file_root, refs[0])
    finally:
        os.umask(old)
    assert stat.S_IMODE((root / "resume.json").stat().st_mode) == expected


def test_a_damaged_note_of_what_was_followed_stops_no_start_and_an_order_says_what_it_does_without(
    start: Any, root_uri: str
) -> None:
    refs = trusted_run(start, root_uri)
    open_storage(root_uri).replace(FOLLOWED_NAME, b"{")
    assert restart(start, root_uri).checkpoint == refs[-1]
    with pytest.raises(ContractError, match=r"followed\.json: .*; remove it; the order then counts as given without"):
        give(root_uri, refs[1])
    open_storage(root_uri).remove_file(FOLLOWED_NAME)
    assert restart(start, root_uri, 19).checkpoint == refs[-1]
    give(root_uri, refs[1])
    assert restart(start, root_uri).checkpoint == refs[1]
