"""Where a run starts: at the checkpoint that the recovery ordered, or at the newest trusted one. Never the latest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from truestep.checkpoints.catalogue import (
    CheckpointRecord,
    Trust,
    find_record,
    list_records,
    read_record,
    read_tombstone,
    trust_statement,
)
from truestep.checkpoints.errors import (
    CheckpointCorruptError,
    CheckpointError,
    NoUsableCheckpointError,
    TombstoneError,
)
from truestep.checkpoints.files import require_plain_names
from truestep.checkpoints.ranks import Attached, attempt_on_every_rank, decide_on_rank_0, own_rank
from truestep.checkpoints.sharded_files import LAYOUT_NAME
from truestep.checkpoints.storage import Storage, open_storage
from truestep.checkpoints.verified import VerifiedCheckpoints
from truestep.contract import (
    INCIDENT_ID,
    TOMBSTONE_NAME,
    CheckpointManifest,
    CheckpointRef,
    ResumeDirective,
    Step,
    Tombstone,
    canonical_bytes,
    directive_sha256,
    from_json,
    to_json,
)
from truestep.contract.words import counted
from truestep.directives import (
    ORDER_COMMAND,
    answers,
    directive_in_force,
    note_followed,
    why_over,
    why_unanswered,
)
from truestep.protocols import ResumePoint
from truestep.report.start import say_at_start

_LOG = logging.getLogger("truestep.resumption")
_RESTORE = f"restore one of them from a copy, or order another one: `{ORDER_COMMAND} <checkpoint>`"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint that may be tried; `resume` tries them in order."""

    ref: CheckpointRef
    trusted: bool
    statement: str = ""
    """For which faults it is trusted."""
    written_by: int = 0
    """Ranks that wrote it; 0 where that is not known."""
    reshardable: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What rank 0 found, and every rank then follows."""

    directive: ResumeDirective | None = None
    candidates: tuple[Candidate, ...] = ()
    skipped: tuple[str, ...] = ()
    empty: bool = False
    """Nothing was ever trusted below the root: a start from step 0 is right."""
    tombstone_alarm_id: str = ""


def resume(
    attachment: Attached, checkpoints: VerifiedCheckpoints, *, directive: ResumeDirective | None = None
) -> ResumePoint:
    """Load the state to start from, on every rank, and say which step comes first. Collective.

    With a directive: exactly the checkpoint that it orders (or a trusted one that descends from it, when the job
    restarts under the same directive), else the next older trusted one at or below its ``max_step``. Without: the
    newest trusted one; step 0 where there has never been one. A candidate counts only if on every rank each
    file's SHA-256 and the loaded weights' fingerprint are what the manifest says. Random number generators are restored
    by rank.

    directive: default: rank 0's `directive_in_force`. Raises on every rank: `TombstoneError` over an alarm that the
    directive does not answer, `ResumeError` where two orders contradict, `BannedGpuError`, `NoUsableCheckpointError`
    where every candidate was refused, `ContractError` for a directive that cannot be understood. The state is undefined
    afterwards.
    """
    decided = decide_on_rank_0(
        attachment,
        lambda: to_json(make_plan(checkpoints.storage, directive_in_force(checkpoints.storage, directive))),
    )
    plan = from_json(Plan, decided)
    if plan.directive is not None:
        _refuse_banned_gpus(attachment, plan.directive)
    skipped = list(plan.skipped)
    for candidate in plan.candidates:
        refused = _try(attachment, checkpoints, candidate)
        if refused is None:
            # Said only here: where nothing is left, the error lists each refusal, and twice is once too often.
            for text in skipped[len(plan.skipped) :] if attachment.rank == 0 else ():
                _LOG.warning("%s", text)
            return _start(attachment, checkpoints, plan, candidate, tuple(skipped))
        skipped.append(refused)
    if plan.directive is not None or not plan.empty:
        advice = _rank_count_advice(plan.candidates, attachment.world_size, reshard=checkpoints.reshard)
        raise NoUsableCheckpointError(_nothing_left(checkpoints.root_uri, plan.directive, skipped, advice))
    attachment.resumed = ResumePoint(start_step=Step(0), skipped=tuple(skipped))
    if attachment.rank == 0:
        untrusted = (
            f"; of {counted(len(skipped), 'checkpoint')} there none is trusted, and `{ORDER_COMMAND} <checkpoint>`"
        )
        why = f"{untrusted} orders one all the same" if skipped else ", where no checkpoint lies yet"
        say_at_start(f"truestep: starts at step 0 of {checkpoints.root_uri}{why}")
    return attachment.resumed


def make_plan(storage: Storage, directive: ResumeDirective | None) -> Plan:
    """Which checkpoints to try, in which order, and why not others. Reads the storage; no communication."""
    tombstone = read_tombstone(storage)
    if tombstone is not None and not (directive and answers(directive, tombstone)):
        raise _unanswered(storage, tombstone, directive)
    records = list_records(storage)
    if directive is None:
        candidates, skipped = _newest_trusted(records)
    else:
        candidates, skipped = _ordered(storage, records, directive)
    return Plan(
        directive=directive,
        candidates=tuple(candidates),
        skipped=tuple(skipped),
        empty=not candidates,
        tombstone_alarm_id=tombstone.alarm_id if tombstone else "",
    )


def _newest_trusted(records: Sequence[CheckpointRecord]) -> tuple[list[Candidate], list[str]]:
    trusted = [_candidate(record, records) for record in records if record.trust is Trust.TRUSTED]
    newest = trusted[0].ref.step if trusted else -1
    return trusted, [_why_not(record) for record in records if record.ref.step > newest]


def _ordered(
    storage: Storage, records: Sequence[CheckpointRecord], directive: ResumeDirective
) -> tuple[list[Candidate], list[str]]:
    lineage = directive_sha256(directive)
    candidates = [
        _candidate(record, records)
        for record in records
        if record.trust is Trust.TRUSTED and record.manifest and record.manifest.directive_sha256 == lineage
    ]
    skipped: list[str] = []
    limit = directive.max_step
    ordered = _find_ordered(storage, records, directive)
    if isinstance(ordered, str):
        skipped.append(ordered)
    elif ordered.ref.step > directive.max_step:
        skipped.append(f"{ordered.ref.uri}: ordered, but its step {ordered.ref.step} is above max_step {limit}")
    else:
        limit = Step(min(limit, ordered.ref.step))
        if ordered.trust in (Trust.REVOKED, Trust.UNREADABLE):
            skipped.append(_why_not(ordered))
        else:
            candidates.append(_candidate(ordered, records))
    for record in records:
        if record.ref.step > limit or record.ref.manifest_sha256 == directive.manifest_sha256:
            continue
        if record.trust is Trust.TRUSTED and _candidate(record, records) not in candidates:
            candidates.append(_candidate(record, records))
    return candidates, skipped


def _find_ordered(
    storage: Storage, records: Sequence[CheckpointRecord], directive: ResumeDirective
) -> CheckpointRecord | str:
    """The ordered checkpoint, by the hash that is its identity, else by its URI; or a sentence why there is none."""
    for record in records:
        if record.ref.manifest_sha256 == directive.manifest_sha256:
            return record
    parent, _, directory = directive.checkpoint_uri.rstrip("/").rpartition("/")
    try:
        elsewhere = storage if parent == storage.root_uri else open_storage(parent)
        found = find_record(elsewhere, directory)
    except CheckpointError as error:
        return f"{directive.checkpoint_uri}: ordered, but cannot be read: {error}"
    if found is None:
        return f"{directive.checkpoint_uri}: ordered, but it does not exist (no manifest there)"
    if found.ref.manifest_sha256 != directive.manifest_sha256:
        return (
            f"{directive.checkpoint_uri}: its manifest has SHA-256 {found.ref.manifest_sha256[:12]}..., "
            f"the directive orders {directive.manifest_sha256[:12]}...: another checkpoint, or a changed manifest"
        )
    return found


def _candidate(record: CheckpointRecord, records: Sequence[CheckpointRecord]) -> Candidate:
    trusted = record.trust is Trust.TRUSTED
    return Candidate(
        ref=record.ref,
        trusted=trusted,
        statement=trust_statement(record, records) if trusted else "",
        written_by=record.manifest.world_size if record.manifest else 0,
        reshardable=record.manifest is not None and _reshardable(record.manifest),
    )


def _why_not(record: CheckpointRecord) -> str:
    reason = record.reason or "written, but no audit has passed since, so it is not trusted"
    return f"{record.ref.uri}: {reason}"


def _unanswered(storage: Storage, tombstone: Tombstone, directive: ResumeDirective | None) -> TombstoneError:
    root_uri, over = storage.root_uri, why_over(storage, tombstone)
    advice = (
        f"let the recovery order where to start, or order it yourself: `{ORDER_COMMAND} {root_uri}` takes the newest "
        f"trusted checkpoint, and in place of the root it takes any that `truestep checkpoints list {root_uri}` shows. "
        f"Where there is none, remove {root_uri}/{TOMBSTONE_NAME} to start at step 0"
    )
    what = f"alarm {tombstone.alarm_id} at step {tombstone.step} ended this run at {tombstone.at}"
    what = f"{what} ({over})" if over else what
    why = why_unanswered(directive, tombstone) if directive else "no resume directive answers it"
    return TombstoneError(f"{what} and {why}: {advice}")


def _refuse_banned_gpus(attachment: Attached, directive: ResumeDirective) -> None:
    from truestep.attachment import BannedGpuError

    banned = [row for row in attachment.identities if row.gpu_uuid and row.gpu_uuid in directive.banned_gpu_uuids]
    if banned:
        where = "; ".join(f"rank {row.rank} on {row.node_name} has {row.gpu_uuid}" for row in banned)
        raise BannedGpuError(
            f"incident {directive.incident_id} bans a GPU that is part of this run: {where}; keep the job off that "
            "node (cordon it) or replace it, then start again"
        )


def _try(attachment: Attached, checkpoints: VerifiedCheckpoints, candidate: Candidate) -> str | None:
    """Load on every rank. None where it worked on all, else why not, the same sentence on every rank."""
    root, _, directory = candidate.ref.uri.rpartition("/")
    storage = checkpoints.storage if root == checkpoints.root_uri else open_storage(root)

    def load(kept: ExitStack) -> Any:
        record = read_record(storage, directory)
        if record is None or record.manifest is None or record.ref != candidate.ref:
            raise CheckpointCorruptError("its manifest is not the one that rank 0 read, or this rank cannot see it")
        _require_size(record.manifest, attachment.world_size, reshard=checkpoints.reshard)
        require_plain_names(record.manifest)
        manifest, rank = record.manifest, own_rank(attachment)
        finish = checkpoints.state.load(storage, directory, manifest, rank, attachment.world_size, kept)
        # Steps of their own: each may take every rank, and one may have failed in the step before.
        later.extend((finish, lambda: checkpoints.state.prove(candidate.ref.uri, manifest)))

    later: list[Callable[[], None]] = []
    with ExitStack() as kept:
        _, failures, _ = attempt_on_every_rank(attachment, lambda: load(kept))
        while not failures and later:
            _, failures, _ = attempt_on_every_rank(attachment, later.pop(0))
    return f"{candidate.ref.uri}: refused; {'; '.join(failures)}" if failures else None


def _require_size(manifest: CheckpointManifest, world_size: int, *, reshard: bool) -> None:
    written_by = manifest.world_size
    if written_by == world_size:
        return
    reshardable = _reshardable(manifest)
    if not reshardable or not reshard:
        advice = ", or give VerifiedCheckpoints(..., reshard=True)" if reshardable else ""
        raise CheckpointError(
            f"it was written by {counted(written_by, 'rank')} and this run has {world_size}: batches and random "
            f"numbers would differ; start {counted(written_by, 'rank')}{advice}"
        )
    _LOG.warning(
        "loading a checkpoint of %d ranks into %d: its weights are proved, batches and random numbers differ from here",
        written_by,
        world_size,
    )


def _reshardable(manifest: CheckpointManifest) -> bool:
    return any(entry.path == LAYOUT_NAME for entry in manifest.files)


def _start(
    attachment: Attached, checkpoints: VerifiedCheckpoints, plan: Plan, candidate: Candidate, skipped: tuple[str, ...]
) -> ResumePoint:
    directive = plan.directive
    point = ResumePoint(
        start_step=Step(candidate.ref.step + 1),
        checkpoint=candidate.ref,
        incident_id=directive.incident_id if directive else "",
        directive_sha256=directive_sha256(directive) if directive else "",
        skipped=skipped,
    )
    if directive is not None:
        checkpoints.note_directive(directive)
        attempt_id = attachment.run.attempt_id
        decide_on_rank_0(attachment, lambda: note_followed(checkpoints.storage, directive, attempt_id))
    if candidate.trusted:
        checkpoints.note_trusted(candidate.ref)
    if plan.tombstone_alarm_id:
        decide_on_rank_0(attachment, lambda: _retire_tombstone(checkpoints.storage, plan.tombstone_alarm_id))
    attachment.resumed = point
    if attachment.rank == 0:
        trust = candidate.statement or "not trusted, but ordered"
        order = f", {_order_text(directive)}" if directive else ", the newest trusted one"
        say_at_start(
            f"truestep: resumed from step {candidate.ref.step}{order}: {trust}. First step {point.start_step}; "
            f"{candidate.ref.uri}"
        )
        checkpoints.reporter.resumed(point, [row.node_name for row in attachment.identities])
    return point


def _order_text(directive: ResumeDirective) -> str:
    by_recovery = INCIDENT_ID.fullmatch(directive.incident_id)
    return f"ordered by incident {directive.incident_id}" if by_recovery else f"ordered {directive.incident_id}"


def _retire_tombstone(storage: Storage, alarm_id: str) -> None:
    """The directive was carried out: the next restart must not need it any more. The tombstone stays readable."""
    tombstone = read_tombstone(storage)
    if tombstone is not None and tombstone.alarm_id == alarm_id:
        storage.replace(f"tombstones/{alarm_id}.json", canonical_bytes(tombstone))
        storage.remove_file(TOMBSTONE_NAME)


def _nothing_left(root_uri: str, directive: ResumeDirective | None, skipped: Sequence[str], advice: str) -> str:
    order = f"incident {directive.incident_id} orders {directive.checkpoint_uri}" if directive else "no directive"
    reasons = "\n".join(f"  - {reason}" for reason in skipped) or "  - there is none"
    return (
        f"no checkpoint below {root_uri} can be resumed from ({order}):\n{reasons}\n"
        f"{advice or _RESTORE}; nothing was started"
    )


def _rank_count_advice(candidates: Sequence[Candidate], world_size: int, *, reshard: bool) -> str:
    """What to do where every candidate is refused for the number of ranks alone; a copy would be refused as well."""
    counts = sorted({candidate.written_by for candidate in candidates})
    loadable = any(reshard and candidate.reshardable for candidate in candidates)
    if not counts or 0 in counts or world_size in counts or loadable:
        return ""
    wanted = " or ".join(map(str, counts[:-1])) + (" or " if counts[1:] else "")
    advice = f"start {wanted}{counted(counts[-1], 'rank')} instead of {world_size}"
    if any(candidate.reshardable for candidate in candidates):
        return f"{advice}, or give VerifiedCheckpoints(..., reshard=True)"
    return advice
