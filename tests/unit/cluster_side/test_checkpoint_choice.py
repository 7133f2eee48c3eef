"""Which checkpoint is resumed from, which are revoked, and what is said of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdas.domain.checkpoint_choice import Candidate, ManifestState, choose_checkpoint, sentences, without
from truestep.contract import CheckpointRef, Step

RUN = "run-1"
ALARM = "ab" * 16


def candidate(step: int, **changes: Any) -> Candidate:
    ref = CheckpointRef(uri=f"s3://b/r/step-{step:08d}", step=Step(step), manifest_sha256=f"{step:064x}")
    made = Candidate(checkpoint=ref, run_id=RUN, trusted=True, manifest=ManifestState.VERIFIED)
    return dataclasses.replace(made, **changes)


def choose(*candidates: Candidate, clean: int | None = 100, margin: int = 0) -> tuple[int | None, dict[int, str]]:
    choice = choose_checkpoint(
        candidates,
        run_id=RUN,
        alarm_id=ALARM,
        clean_through=None if clean is None else Step(clean),
        margin_steps=margin,
    )
    reasons: dict[int, str] = {entry.checkpoint.step: entry.reason for entry in choice.rejections}
    return (choice.chosen.step if choice.chosen else None), reasons


def test_the_newest_trusted_one_at_or_before_the_clean_step_wins_not_the_latest() -> None:
    chosen, reasons = choose(candidate(50), candidate(100), candidate(101), candidate(150))
    assert chosen == 100
    assert set(reasons) == {50, 101, 150}
    assert "suspect window" in reasons[101]
    assert "older than the chosen" in reasons[50]


def test_the_margin_makes_the_choice_older() -> None:
    assert choose(candidate(50), candidate(100), margin=1)[0] == 50


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"trusted": False}, "never trusted"),
        ({"revoked_by": "inc-9"}, "revoked by incident inc-9"),
        ({"run_id": "another"}, "belongs to run another"),
        ({"manifest": ManifestState.DIFFERENT}, "different"),
        ({"manifest": ManifestState.MISSING}, "missing"),
        ({"manifest": ManifestState.INCOMPLETE}, "incomplete"),
        ({"manifest": ManifestState.UNREADABLE}, "unreadable"),
    ],
)
def test_a_flawed_checkpoint_is_passed_over_with_its_reason(changes: dict[str, object], word: str) -> None:
    chosen, reasons = choose(candidate(50), candidate(100, **changes))
    assert chosen == 50
    assert word in reasons[100]


def test_a_checkpoint_out_of_reach_is_left_to_the_ranks_to_verify() -> None:
    assert choose(candidate(100, manifest=ManifestState.OUT_OF_REACH))[0] == 100


def test_nothing_suitable_chooses_nothing_and_lists_every_reason() -> None:
    chosen, reasons = choose(candidate(50, trusted=False), candidate(150))
    assert chosen is None
    assert set(reasons) == {50, 150}


def test_without_a_known_clean_step_nothing_is_chosen_and_nothing_revoked() -> None:
    choice = choose_checkpoint([candidate(1)], run_id=RUN, alarm_id=ALARM, clean_through=None, margin_steps=0)
    assert choice.chosen is None
    assert choice.to_revoke == ()
    assert "no step is known to be clean" in choice.reason


def test_of_two_checkpoints_of_one_step_the_one_written_later_wins() -> None:
    first = candidate(100, written_at="2026-01-01T00:00:00Z")
    ref = dataclasses.replace(first.checkpoint, uri=first.checkpoint.uri + "-a1b2c3d4", manifest_sha256="f" * 64)
    second = candidate(100, checkpoint=ref, written_at="2026-01-02T00:00:00Z")
    choice = choose_checkpoint([first, second], run_id=RUN, alarm_id=ALARM, clean_through=Step(100), margin_steps=0)
    assert choice.chosen == ref


def test_a_copy_of_a_revoked_checkpoint_is_refused_whatever_its_folder_is_called() -> None:
    revoked = candidate(100, revoked_by="inc-9")
    uri = revoked.checkpoint.uri + "-copy"
    copy = candidate(100, checkpoint=dataclasses.replace(revoked.checkpoint, uri=uri), written_at="2026-01-02")
    anew = dataclasses.replace(revoked.checkpoint, uri=revoked.checkpoint.uri + "-a1b2c3d4", manifest_sha256="f" * 64)
    for manifest in (ManifestState.VERIFIED, ManifestState.MISSING):
        origin = dataclasses.replace(revoked, manifest=manifest)
        choice = choose_checkpoint(
            [candidate(50), origin, copy], run_id=RUN, alarm_id=ALARM, clean_through=Step(200), margin_steps=0
        )
        assert choice.chosen == candidate(50).checkpoint
        assert f"{uri} is a copy of {revoked.checkpoint.uri}, revoked by incident inc-9" in sentences(choice)[0]
    trained_again = candidate(100, checkpoint=anew)
    choice = choose_checkpoint(
        [revoked, copy, trained_again], run_id=RUN, alarm_id=ALARM, clean_through=Step(200), margin_steps=0
    )
    assert choice.chosen == anew, "the same step, trained again after the rollback"


def test_a_copy_inside_the_window_gets_a_mark_of_its_own() -> None:
    revoked = candidate(150, revoked_by="inc-9")
    copy = candidate(150, checkpoint=dataclasses.replace(revoked.checkpoint, uri=revoked.checkpoint.uri + "-copy"))
    choice = choose_checkpoint(
        [candidate(50), revoked, copy], run_id=RUN, alarm_id=ALARM, clean_through=Step(100), margin_steps=0
    )
    assert choice.to_revoke == (copy.checkpoint,)


def test_taking_out_the_chosen_one_moves_the_choice_to_the_next_older() -> None:
    newest = candidate(100)
    entries = without((candidate(50), newest), newest.checkpoint, "model.pt (missing instead of 5 bytes)")
    chosen, reasons = choose(*entries)
    assert chosen == 50
    assert "model.pt" in reasons[100]


def test_sentences_can_be_limited_to_what_is_newer_than_the_chosen() -> None:
    choice = choose_checkpoint(
        [candidate(10), candidate(100), candidate(101)],
        run_id=RUN,
        alarm_id=ALARM,
        clean_through=Step(100),
        margin_steps=0,
    )
    assert [text.split(":")[0] for text in sentences(choice, newer_than=Step(100))] == ["step 101"]


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        choose(candidate(1), margin=-1)


entries = st.lists(
    st.builds(
        candidate,
        st.integers(0, 300),
        trusted=st.booleans(),
        revoked_by=st.sampled_from(["", "inc-9"]),
        manifest=st.sampled_from(list(ManifestState)),
        run_id=st.sampled_from([RUN, "another"]),
    ),
    max_size=12,
    unique_by=lambda entry: entry.checkpoint.step,
)


@given(entries=entries, clean=st.integers(0, 300), margin=st.integers(0, 200))
def test_no_choice_ever_breaks_a_rule(entries: list[Candidate], clean: int, margin: int) -> None:
    choice = choose_checkpoint(entries, run_id=RUN, alarm_id=ALARM, clean_through=Step(clean), margin_steps=margin)
    by_ref = {entry.checkpoint: entry for entry in entries}
    suitable = [
        entry.checkpoint.step
        for entry in entries
        if entry.trusted
        and not entry.revoked_by
        and entry.run_id == RUN
        and entry.manifest in (ManifestState.VERIFIED, ManifestState.OUT_OF_REACH)
        and entry.checkpoint.step <= clean - margin
    ]
    assert (choice.chosen.step if choice.chosen else None) == max(suitable, default=None)
    assert len(choice.rejections) == len(entries) - (choice.chosen is not None)
    assert all(by_ref[ref].run_id == RUN and ref.step > clean for ref in choice.to_revoke)
    assert choice.chosen not in choice.to_revoke
    window = [entry for entry in entries if entry.run_id == RUN and entry.checkpoint.step > clean]
    expected = 0 if choice.chosen is None else sum(not entry.revoked_by for entry in window)
    assert len(choice.to_revoke) == expected


def test_a_margin_that_leaves_nothing_to_choose_revokes_nothing() -> None:
    entries = [candidate(step) for step in range(99, 1100, 100)]
    wide = choose_checkpoint(entries, run_id=RUN, alarm_id=ALARM, clean_through=Step(999), margin_steps=1422)
    assert (wide.chosen, wide.to_revoke) == (None, ())
    narrow = choose_checkpoint(entries, run_id=RUN, alarm_id=ALARM, clean_through=Step(999), margin_steps=420)
    assert narrow.chosen is not None
    assert narrow.chosen.step == 499
    assert [ref.step for ref in narrow.to_revoke] == [1099], "599 to 999 are passed over, not revoked"


def trained_since(step: int, *, from_step: int, **changes: Any) -> Candidate:
    """Of a run that an order to start from another checkpoint began after the alarm."""
    origin = candidate(from_step).checkpoint
    digest = f"{step:063x}f"
    ref = CheckpointRef(uri=f"s3://b/r/step-{step:08d}-again", step=Step(step), manifest_sha256=digest)
    return candidate(step, **{"checkpoint": ref, "ordered": origin, "answers_alarm_ids": (ALARM,), **changes})


def test_what_was_trained_after_the_alarm_from_a_clean_checkpoint_is_never_revoked_and_goes_on() -> None:
    window = [candidate(50), candidate(99), candidate(119), candidate(5000)]
    again = [trained_since(step, from_step=99) for step in (119, 2119, 5119)]
    choice = choose_checkpoint([*window, *again], run_id=RUN, alarm_id=ALARM, clean_through=Step(110), margin_steps=0)
    assert choice.to_revoke == (window[2].checkpoint, window[3].checkpoint)
    assert choice.chosen == again[2].checkpoint
    assert choice.reason.startswith(
        "step 5119 was trained and trusted after the alarm, from a checkpoint before step 110"
    )
    # What an order leads on to from there is no part of the suspect window either, nor with what it came from removed.
    third = trained_since(9000, from_step=0, ordered=again[2].checkpoint)
    later = choose_checkpoint(
        [*window, *again, third], run_id=RUN, alarm_id=ALARM, clean_through=Step(110), margin_steps=0
    )
    assert (later.chosen, later.to_revoke) == (third.checkpoint, choice.to_revoke)


def test_the_margin_holds_for_what_was_trained_since_too() -> None:
    again = [trained_since(step, from_step=50) for step in (500, 600, 700)]
    entries = [candidate(50), candidate(99), *again, trained_since(800, from_step=50, trusted=False)]
    for margin, chosen in ((0, 700), (60, 600), (101, 500)):
        choice = choose_checkpoint(entries, run_id=RUN, alarm_id=ALARM, clean_through=Step(160), margin_steps=margin)
        assert (choice.chosen and choice.chosen.step) == chosen
        assert choice.to_revoke == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"answers_alarm_ids": ("cd" * 16,)},
        {"answers_alarm_ids": ()},
        {"ordered": None},
        {"ordered": candidate(115).checkpoint},
    ],
    ids=["answers another alarm", "answers none", "no order", "ordered from the suspect window"],
)
def test_what_was_not_trained_after_the_alarm_from_a_clean_checkpoint_stays_suspect(changes: dict[str, Any]) -> None:
    suspect = trained_since(5119, from_step=99, **changes)
    choice = choose_checkpoint(
        [candidate(99), suspect], run_id=RUN, alarm_id=ALARM, clean_through=Step(110), margin_steps=0
    )
    assert (choice.chosen and choice.chosen.step, choice.to_revoke) == (99, (suspect.checkpoint,))
