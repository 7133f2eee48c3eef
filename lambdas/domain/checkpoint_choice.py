"""Which checkpoint to resume from: the newest trusted one that is older than anything the fault may have touched.

Pure. Trust is probabilistic: an audit that passed says that the GPU computed right in *that* step. A fault that hits
only some steps can slip between two passing audits, so the policy's margin is taken off `clean_through` first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from truestep.contract import Alarm, CheckpointRef, Step
from truestep.contract.words import counted


class ManifestState(StrEnum):
    """What was found where the manifest of a checkpoint should be."""

    VERIFIED = "verified"
    """Its bytes hash to what the trust mark names, and every listed file is there with the listed size."""
    OUT_OF_REACH = "out of reach"
    """On a file system that only training pods mount; every rank verifies the hash before it loads."""
    MISSING = "missing"
    DIFFERENT = "different"
    """The manifest's hash is not the one that was trusted or reported."""
    INCOMPLETE = "incomplete"
    """A listed file is missing or has another size."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One checkpoint as the catalogue found it."""

    checkpoint: CheckpointRef
    run_id: str
    trusted: bool
    revoked_by: str = ""
    """Incident that revoked it, or words for one that is not known; empty where none did."""
    manifest: ManifestState
    detail: str = ""
    """What exactly is wrong with the manifest; empty where nothing is."""
    written_at: str = ""
    """ISO 8601, UTC: of two checkpoints of one step, trained twice, the one written later is newer."""
    ordered: CheckpointRef | None = None
    """What the directive ordered under which it was trained; None where none did."""
    answers_alarm_ids: tuple[str, ...] = ()
    """Alarms that this directive answers: it was trained after them."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A checkpoint that is not resumed from, and why."""

    checkpoint: CheckpointRef
    reason: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision, the sentence that explains it, and what becomes of every other checkpoint."""

    chosen: CheckpointRef | None
    reason: str
    rejections: tuple[Rejection, ...]
    """One for every other candidate, newest first."""
    to_revoke: tuple[CheckpointRef, ...]
    """Newer than the last clean step, not trained after the alarm from a clean one, and not yet revoked; oldest first.
    Empty where nothing was chosen."""


def age(candidate: Candidate) -> tuple[int, str, str]:
    """Sort key: newer checkpoints have a greater one."""
    return candidate.checkpoint.step, candidate.written_at, candidate.checkpoint.uri


def choose_checkpoint(
    candidates: Iterable[Candidate], *, run_id: str, alarm_id: str, clean_through: Step | None, margin_steps: int
) -> Choice:
    """The newest trusted checkpoint of the run at or before ``clean_through - margin_steps``; never merely the latest.

    What an order that answers the alarm has led to since, from a clean checkpoint on, is outside the suspect window
    whatever its step: it is not revoked, and is measured by its own newest trusted step instead of `clean_through`.

    Without a known clean step nothing is chosen and nothing revoked: then only a person can tell what to trust. A
    revocation is for good, so it needs more than the margin, which is a precaution: the step must be newer than the
    last clean one, and there must be something to resume from without it. It holds for every copy: the hash of its
    manifest is a checkpoint's identity, and one that was trained again has another. Raises ValueError for a negative
    margin.
    """
    if margin_steps < 0:
        raise ValueError(f"margin_steps is {margin_steps}: a margin only makes the choice older, so it is 0 or more")
    ordered = sorted(candidates, key=age, reverse=True)
    revoked = {entry.checkpoint.manifest_sha256: entry for entry in ordered if entry.revoked_by}
    limit = None if clean_through is None else Step(clean_through - margin_steps)
    since = _trained_since(ordered, alarm_id, limit)
    proved = [one.checkpoint.step for one in ordered if _is_in(one, since) and one.trusted and not one.revoked_by]
    limit_since = Step(max(proved, default=0) - margin_steps)
    chosen: CheckpointRef | None = None
    rejections: list[Rejection] = []
    for candidate in ordered:
        newest: Step | None
        if _is_in(candidate, since):
            newest, too_new = limit_since, f"newer than step {limit_since}, through which its audits prove it"
        else:
            newest, too_new = limit, f"inside the suspect window (newer than step {limit})"
        objection = _objection(candidate, run_id, newest, too_new, revoked)
        if not objection and chosen is None:
            chosen = candidate.checkpoint
            continue
        if not objection:
            objection = "trusted, but older than the chosen one"
        rejections.append(Rejection(checkpoint=candidate.checkpoint, reason=objection))
    return Choice(
        chosen=chosen,
        reason=_reason(chosen, ordered, since, clean_through, margin_steps),
        rejections=tuple(rejections),
        to_revoke=() if chosen is None else _after_clean(ordered, run_id, alarm_id, clean_through),
    )


def _trained_since(ordered: list[Candidate], alarm_id: str, through: Step | None) -> frozenset[str]:
    """Manifest hashes of what was trained after the alarm, from a checkpoint at or before this step on.

    Told by what training wrote down of its order, and by no time. An order may lead back to what an earlier one that
    answers this alarm has led to.
    """
    found: set[str] = set()
    for one in reversed(ordered):  # what was ordered is older than what came of it
        if one.ordered is None or through is None or alarm_id not in one.answers_alarm_ids:
            continue
        if one.ordered.step <= through or one.ordered.manifest_sha256 in found:
            found.add(one.checkpoint.manifest_sha256)
    return frozenset(found)


def _is_in(candidate: Candidate, since: frozenset[str]) -> bool:
    return candidate.checkpoint.manifest_sha256 in since


def _revoked_by(candidate: Candidate) -> str:
    return f"revoked by {'incident ' if candidate.revoked_by.startswith('inc-') else ''}{candidate.revoked_by}"


def _objection(
    candidate: Candidate, run_id: str, newest: Step | None, too_new: str, revoked: Mapping[str, Candidate]
) -> str:
    if candidate.run_id and run_id and candidate.run_id != run_id:
        return f"belongs to run {candidate.run_id}, not {run_id}"
    if candidate.revoked_by:
        return _revoked_by(candidate)
    if origin := revoked.get(candidate.checkpoint.manifest_sha256):
        return f"{candidate.checkpoint.uri} is a copy of {origin.checkpoint.uri}, {_revoked_by(origin)}"
    if newest is None:
        return "the alarm knows no clean step to measure it against"
    if candidate.checkpoint.step > newest:
        return too_new
    if not candidate.trusted:
        return "only written, never trusted: no audit passed at or after its step"
    if candidate.manifest not in (ManifestState.VERIFIED, ManifestState.OUT_OF_REACH):
        return f"manifest {candidate.manifest}" + (f": {candidate.detail}" if candidate.detail else "")
    return ""


def _after_clean(
    ordered: list[Candidate], run_id: str, alarm_id: str, clean_through: Step | None
) -> tuple[CheckpointRef, ...]:
    if clean_through is None:
        return ()
    since = _trained_since(ordered, alarm_id, clean_through)
    return tuple(
        entry.checkpoint
        for entry in reversed(ordered)
        if entry.checkpoint.step > clean_through
        and not _is_in(entry, since)
        and not entry.revoked_by
        and entry.run_id in ("", run_id)
    )


def _reason(
    chosen: CheckpointRef | None,
    ordered: list[Candidate],
    since: frozenset[str],
    clean_through: Step | None,
    margin: int,
) -> str:
    if clean_through is None:
        return f"no step is known to be clean, so of {counted(len(ordered), 'checkpoint')} none can be trusted"
    window = f"step {clean_through} (newest clean step) minus a margin of {margin}"
    if chosen is None:
        return f"of {counted(len(ordered), 'checkpoint')} none is trusted, intact and at or before {window}"
    if chosen.manifest_sha256 in since:
        return f"step {chosen.step} was trained and trusted after the alarm, from a checkpoint before {window} on"
    return f"step {chosen.step} is the newest trusted checkpoint at or before {window}"


def newest_clean_step(alarm: Alarm) -> Step | None:
    """The newest step that the alarm knows to be clean.

    A run that was caught before its own first audit knows none; then the step of the checkpoint that it trusted counts,
    because an audit had passed at or after that step.
    """
    if alarm.clean_through is not None:
        return alarm.clean_through
    return None if alarm.checkpoint is None else alarm.checkpoint.step


def sentences(choice: Choice, *, newer_than: Step | None = None) -> tuple[str, ...]:
    """One sentence for every rejected checkpoint, newest first; only those newer than a step where one is given."""
    return tuple(
        f"step {entry.checkpoint.step}: {entry.reason}"
        for entry in choice.rejections
        if newer_than is None or entry.checkpoint.step > newer_than
    )


def without(candidates: Iterable[Candidate], checkpoint: CheckpointRef, detail: str) -> tuple[Candidate, ...]:
    """The candidates, with this one found incomplete."""
    return tuple(
        dataclasses.replace(entry, manifest=ManifestState.INCOMPLETE, detail=detail)
        if entry.checkpoint == checkpoint
        else entry
        for entry in candidates
    )
