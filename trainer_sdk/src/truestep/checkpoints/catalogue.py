"""Which checkpoints lie below a root, and whether they can be trusted. Reads only; needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.checkpoints.storage import Storage, open_storage
from truestep.contract import (
    MANIFEST_NAME,
    REVOKED_NAME,
    TOMBSTONE_NAME,
    TRUSTED_NAME,
    CheckpointManifest,
    CheckpointRef,
    ContractError,
    RevocationMark,
    Step,
    Tombstone,
    TrustMark,
    UnknownVersionError,
    canonical_bytes,
    from_json,
    parse_json,
)

T = TypeVar("T")

STEP_PREFIX = "step-"
_PLACES = 10_000
_DIRECTORY = re.compile(r"step-(\d{8,})(?:-.+)?")


class Trust(StrEnum):
    """How far a checkpoint can be trusted."""

    WRITTEN = "written"
    """Complete, but no audit has passed at or after its step."""
    TRUSTED = "trusted"
    REVOKED = "revoked"
    """An incident's suspect window covers it, or what it is a copy of; wins over trusted and is permanent."""
    UNREADABLE = "unreadable"
    """Its manifest or one of its marks is damaged or missing; never used."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One checkpoint below a root."""

    ref: CheckpointRef
    trust: Trust
    manifest: CheckpointManifest | None
    """None only where the manifest is unreadable."""
    mark: TrustMark | None = None
    reason: str = ""
    """Why it is revoked or unreadable."""

    @property
    def directory(self) -> str:
        return self.ref.uri.rsplit("/", 1)[1]


def directory_name(step: Step, suffix: str = "") -> str:
    """Name of the directory of a checkpoint; a suffix where a step is trained again and its name is taken."""
    return f"{STEP_PREFIX}{step:08d}" + (f"-{suffix}" if suffix else "")


def directory_step(name: str) -> Step | None:
    """The step in a directory's name, or None for a directory that is not a checkpoint's."""
    match = _DIRECTORY.fullmatch(name)
    return Step(int(match[1])) if match else None


def list_checkpoints(root_uri: str) -> list[CheckpointRecord]:
    """Every complete checkpoint below `root_uri`, newest first. One without a manifest does not exist.

    Raises `StorageError` where the root cannot be listed; a root that does not exist yet is empty.
    """
    return list_records(open_storage(root_uri))


def list_records(storage: Storage) -> list[CheckpointRecord]:
    """`list_checkpoints` on a storage. Newest first; of one step trained twice, the one written later.

    A copy of a revoked checkpoint is revoked too, whatever its directory is called and whenever it was made: the
    manifest's SHA-256 is a checkpoint's identity, and what was trained again has another manifest.
    """
    names = [name for name in storage.directories(STEP_PREFIX) if directory_step(name) is not None]
    found = {name: read_record(storage, name) for name in names}
    records = [record for record in found.values() if record is not None]
    revoked = {
        record.ref.manifest_sha256: f"{record.ref.uri}, {record.reason}"
        for record in records
        if record.trust is Trust.REVOKED
    }
    for name, record in found.items():
        # The mark stays where the checkpoint was removed, and holds where its manifest is damaged.
        unknown = record is None or record.trust is Trust.UNREADABLE
        if unknown and (mark := _revocation(storage, name)) is not None:
            revoked.setdefault(mark.manifest_sha256, f"{storage.root_uri}/{name}, {_revoked(mark)}")
    return sorted((_unless_copied(record, revoked) for record in records), key=_age, reverse=True)


def _unless_copied(record: CheckpointRecord, revoked: Mapping[str, str]) -> CheckpointRecord:
    origin = revoked.get(record.ref.manifest_sha256)
    if origin is None or record.trust not in (Trust.WRITTEN, Trust.TRUSTED):
        return record
    return dataclasses.replace(record, trust=Trust.REVOKED, mark=None, reason=f"a copy of {origin}")


def _revocation(storage: Storage, directory: str) -> RevocationMark | None:
    """The mark in a directory; None where there is none, or it cannot be read: then it names no other checkpoint."""
    content = storage.read(f"{directory}/{REVOKED_NAME}")
    try:
        return None if content is None else _parse(RevocationMark, content, f"{directory}/{REVOKED_NAME}")
    except CheckpointCorruptError:
        return None


def _revoked(mark: RevocationMark) -> str:
    return f"revoked by incident {mark.incident_id}: {mark.reason}"


def _age(record: CheckpointRecord) -> tuple[int, str]:
    return record.ref.step, record.manifest.created_at if record.manifest else ""


def find_record(storage: Storage, directory: str) -> CheckpointRecord | None:
    """One checkpoint's record as `list_records` has it, which knows whether it is a copy; None without a manifest."""
    listed = (record for record in list_records(storage) if record.directory == directory)
    return next(listed, None) or read_record(storage, directory)


def read_record(storage: Storage, directory: str) -> CheckpointRecord | None:
    """One checkpoint's record, or None where it has no manifest. Whether it is a copy, `find_record` knows."""
    content = storage.read(f"{directory}/{MANIFEST_NAME}")
    step = directory_step(directory) or Step(0)
    where = f"{storage.root_uri}/{directory}"
    if content is None:
        return _without_manifest(storage, directory, step)
    ref = CheckpointRef(uri=where, step=step, manifest_sha256=hashlib.sha256(content).hexdigest())
    try:
        manifest = _parse(CheckpointManifest, content, f"{where}/{MANIFEST_NAME}")
    except CheckpointCorruptError as error:
        return _unreadable(ref, str(error))
    if manifest.step != step:
        return _unreadable(ref, f"{where}/{MANIFEST_NAME} is that of step {manifest.step}: it belongs elsewhere")
    return _with_marks(storage, directory, ref, manifest)


def _without_manifest(storage: Storage, directory: str, step: Step) -> CheckpointRecord | None:
    if storage.read(f"{directory}/{TRUSTED_NAME}") is None:
        return None
    where = f"{storage.root_uri}/{directory}"
    reason = f"{where}/{MANIFEST_NAME} is missing, and {TRUSTED_NAME} beside it says that it was there"
    return _unreadable(CheckpointRef(uri=where, step=step, manifest_sha256=""), reason)


def _unreadable(ref: CheckpointRef, reason: str, manifest: CheckpointManifest | None = None) -> CheckpointRecord:
    return CheckpointRecord(ref=ref, trust=Trust.UNREADABLE, manifest=manifest, reason=reason)


def _with_marks(storage: Storage, directory: str, ref: CheckpointRef, manifest: CheckpointManifest) -> CheckpointRecord:
    revoked = storage.read(f"{directory}/{REVOKED_NAME}")
    if revoked is not None:
        # Even a mark that cannot be read revokes: somebody meant to.
        try:
            mark = _parse(RevocationMark, revoked, f"{ref.uri}/{REVOKED_NAME}")
            reason = _revoked(mark)
        except CheckpointCorruptError as error:
            reason = f"revoked by a mark that cannot be read: {error}"
        return CheckpointRecord(ref=ref, trust=Trust.REVOKED, manifest=manifest, reason=reason)
    trusted = storage.read(f"{directory}/{TRUSTED_NAME}")
    if trusted is None:
        return CheckpointRecord(ref=ref, trust=Trust.WRITTEN, manifest=manifest)
    try:
        trust_mark = _parse(TrustMark, trusted, f"{ref.uri}/{TRUSTED_NAME}")
    except CheckpointCorruptError as error:
        return _unreadable(ref, str(error), manifest)
    if trust_mark.manifest_sha256 != ref.manifest_sha256:
        reason = (
            f"{ref.uri}/{MANIFEST_NAME} is another manifest than the one that {ref.uri}/{TRUSTED_NAME} was given for"
        )
        return _unreadable(ref, reason, manifest)
    if canonical_bytes(trust_mark) != trusted:
        return _unreadable(ref, f"{ref.uri}/{TRUSTED_NAME} is not as it was written", manifest)
    return CheckpointRecord(ref=ref, trust=Trust.TRUSTED, manifest=manifest, mark=trust_mark)


def hit_probability_for(audits: int, risk: float) -> float:
    """The least p, rounded up, at which a fault that hits each step with this p passes `audits` at most with `risk`.

    An audit passes such a fault with probability (1 - p)^2: neither the pass nor its replay may be hit.
    """
    exact = 1.0 - math.pow(risk, 1.0 / (2 * audits))
    return math.ceil(exact * _PLACES) / _PLACES


def audits_passed(record: CheckpointRecord, records: Sequence[CheckpointRecord]) -> int:
    """How many audits of the attempt that wrote a trusted checkpoint are known to have passed at or after its step.

    records: those below the root; their marks say when. At least 1 for a trusted one, 0 for another.
    """
    if record.mark is None or record.manifest is None:
        return 0
    attempt_id, step = record.manifest.attempt_id, record.ref.step
    seen = {
        other.mark.clean_through
        for other in records
        if other.mark is not None and other.manifest is not None and other.manifest.attempt_id == attempt_id
    }
    return len({record.mark.clean_through} | {passed for passed in seen if passed >= step})


def trust_statement(record: CheckpointRecord, records: Sequence[CheckpointRecord]) -> str:
    """For which faults a checkpoint is trusted, and at which risk; empty where it is not trusted."""
    probability, risk = trusted_for(record, records)
    if record.mark is None:
        return ""
    return f"trusted for faults that hit a step with a probability of {probability:.2f} or more (risk {risk:.0%})"


def trusted_for(record: CheckpointRecord, records: Sequence[CheckpointRecord]) -> tuple[float, float]:
    """(hit probability, risk) of a trusted checkpoint; every audit that passed since makes the probability smaller."""
    mark = record.mark
    if mark is None:
        return 1.0, 1.0
    if not 0 < mark.risk < 1:
        return mark.assumed_hit_probability, mark.risk
    return hit_probability_for(max(1, audits_passed(record, records)), mark.risk), mark.risk


def remove_checkpoint(storage: Storage, directory: str) -> None:
    """Remove a checkpoint, mark and manifest first: killed halfway, it no longer exists instead of lacking files."""
    storage.remove_file(f"{directory}/{TRUSTED_NAME}")
    storage.remove_file(f"{directory}/{MANIFEST_NAME}")
    storage.remove_directory(directory)


def left_behind(storage: Storage, records: Sequence[CheckpointRecord]) -> list[str]:
    """Directories without a manifest and older than the newest of `records`: what killed processes left, and marks.

    A newer one may be a save in progress.
    """
    complete = {record.directory for record in records}
    newest = max((record.ref.step for record in records), default=Step(0))
    return [
        name
        for name in storage.directories(STEP_PREFIX)
        if name not in complete and (step := directory_step(name)) is not None and step < newest
    ]


def read_tombstone(storage: Storage) -> Tombstone | None:
    """The tombstone at the root, or None. Raises `CheckpointCorruptError` for one that cannot be read."""
    content, where = storage.read(TOMBSTONE_NAME), f"{storage.root_uri}/{TOMBSTONE_NAME}"
    try:
        return None if content is None else _parse(Tombstone, content, where)
    except CheckpointCorruptError as damaged:
        if isinstance(damaged.__cause__, UnknownVersionError):
            raise
        raise CheckpointCorruptError(
            f"{damaged}. An alarm ended this run, and which one it no longer says, so nothing can answer it: look that "
            f"alarm up where it was sent or printed, then remove {where}. The next start follows the order that lies "
            "there, the recovery's or yours, or resumes from the newest trusted checkpoint"
        ) from damaged


def _parse(cls: type[T], content: bytes, where: str) -> T:
    try:
        return from_json(cls, parse_json(content))
    except (ValueError, ContractError) as error:
        raise CheckpointCorruptError(f"{where} cannot be read: {error}") from error
