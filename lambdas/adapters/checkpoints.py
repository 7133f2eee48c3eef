"""The checkpoints of a run, from the storage's own marks where the functions can read it, else from what training said.

On S3 the marks beside the manifest decide, and events only add what has vanished. A ``file://`` root is a file system
that only training pods mount: there the events are all there is, and the ranks verify the manifest before they load.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.domain.checkpoint_choice import Candidate, ManifestState, age
from lambdas.domain.errors import SettingsError
from lambdas.ports import RecordedCheckpoint
from truestep.contract import (
    MANIFEST_NAME,
    REVOKED_NAME,
    TRUSTED_NAME,
    CheckpointManifest,
    CheckpointRef,
    ContractError,
    RevocationMark,
    Step,
    TruestepError,
    TrustMark,
    from_json,
    parse_json,
    to_json,
)

_STEP_FOLDER = re.compile(r"step-(\d{8,})(?:-[^/]+)?/$")
"""A step that was trained again after a rollback has its attempt in its name."""
_MISSING_CODES = ("NoSuchKey", "404")
MOST_CANDIDATES = 1000
"""Newest checkpoints looked at: each costs up to six requests. Older ones are ignored."""
EARLIER = "an earlier decision"
"""Who revoked a checkpoint that the table alone knows to be revoked."""
_READERS = 10
"""Checkpoints read at a time: as many connections as a boto3 client keeps."""
_T = TypeVar("_T")


class CheckpointRootError(TruestepError):
    """The run's checkpoint root is no URI that the recovery understands."""


class CheckpointCatalogue:
    """Reads and revokes checkpoints. `client`: boto3 S3 client; `locations`: ``bucket`` or ``bucket/prefix`` each."""

    def __init__(self, client: Any, locations: Sequence[str]) -> None:
        self._s3 = client
        self._locations = tuple(locations)

    def candidates(self, root_uri: str, recorded: Iterable[RecordedCheckpoint]) -> tuple[Candidate, ...]:
        """Every checkpoint of the run, newest step first.

        recorded: what the events said. Raises `CheckpointRootError` for a root that is neither ``s3://`` nor
        ``file://``, `SettingsError` for a bucket that the deployment has no grant for.
        """
        try:
            parts = urlsplit(root_uri)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme == "file":
            return _from_events(recorded)
        if parts.scheme != "s3" or not parts.netloc:
            raise CheckpointRootError(
                f"checkpoint root {root_uri!r} is neither s3://bucket/prefix nor file:///path: set "
                "TRUESTEP_CHECKPOINT_ROOT in the training pods"
            )
        entries = tuple(recorded)
        revoked = {entry.event.checkpoint for entry in entries if entry.trust == "revoked"}
        stored = tuple(_with_record(one, revoked) for one in self._stored(parts.netloc, parts.path.strip("/")))
        known = {(one.checkpoint.uri, one.checkpoint.manifest_sha256) for one in stored}
        vanished = (
            Candidate(
                checkpoint=entry.event.checkpoint,
                run_id=entry.event.run.run_id,
                trusted=False,
                revoked_by=EARLIER if entry.event.checkpoint in revoked else "",
                manifest=ManifestState.MISSING,
                detail="an event reported it, the bucket has no such manifest",
                ordered=entry.event.ordered,
                answers_alarm_ids=entry.event.answers_alarm_ids,
            )
            for entry in entries
            if (entry.event.checkpoint.uri, entry.event.checkpoint.manifest_sha256) not in known
        )
        return _newest_first((*stored, *vanished))

    def missing_files(self, checkpoint: CheckpointRef) -> str:
        """What of the manifest's files is not there with the listed size; empty where all are, or none can be seen."""
        parts = urlsplit(checkpoint.uri)
        if parts.scheme != "s3":
            return ""
        folder = parts.path.strip("/") + "/"
        body = self._read(parts.netloc, folder + MANIFEST_NAME)
        if body is None or hashlib.sha256(body).hexdigest() != checkpoint.manifest_sha256:
            return "the manifest changed while it was looked at"
        manifest = from_json(CheckpointManifest, parse_json(body))
        sizes = {name.removeprefix(folder): size for name, size in self._sizes(parts.netloc, folder)}
        wrong = [
            f"{entry.path} ({sizes.get(entry.path, 'missing')} instead of {entry.bytes} bytes)"
            for entry in manifest.files
            if sizes.get(entry.path) != entry.bytes
        ]
        return ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")

    def revoke(self, checkpoint: CheckpointRef, *, incident_id: str, reason: str, at: str) -> bool:
        """Write the permanent mark beside the manifest; twice is once. False on a file system out of reach."""
        parts = urlsplit(checkpoint.uri)
        if parts.scheme != "s3":
            return False
        self._check_granted(parts.netloc, parts.path.strip("/"))
        key = f"{parts.path.strip('/')}/{REVOKED_NAME}"
        mark, _ = _parsed(RevocationMark, self._read(parts.netloc, key))
        if mark is not None:
            return True
        mark = RevocationMark(
            manifest_sha256=checkpoint.manifest_sha256,
            step=checkpoint.step,
            incident_id=incident_id,
            reason=reason,
            revoked_at=at,
        )
        body = json.dumps(to_json(mark), sort_keys=True).encode()
        with transient_errors():
            self._s3.put_object(
                Bucket=parts.netloc, Key=key, Body=body, ContentType="application/json", ChecksumAlgorithm="SHA256"
            )
        return True

    def _stored(self, bucket: str, prefix: str) -> Iterator[Candidate]:
        self._check_granted(bucket, prefix)
        base = f"{prefix}/" if prefix else ""
        with transient_errors():
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=base, Delimiter="/")
            folders = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ())]
        steps = sorted(
            ((int(match[1]), folder) for folder in folders if (match := _STEP_FOLDER.search(folder))), reverse=True
        )
        with ThreadPoolExecutor(_READERS) as readers:
            found = readers.map(
                lambda entry: self._candidate(bucket, entry[1], Step(entry[0])), steps[:MOST_CANDIDATES]
            )
            yield from (candidate for candidate in found if candidate is not None)

    def _candidate(self, bucket: str, folder: str, step: Step) -> Candidate | None:
        body = self._read(bucket, folder + MANIFEST_NAME)
        uri = f"s3://{bucket}/{folder.rstrip('/')}"
        if body is None:
            return self._removed(bucket, folder, CheckpointRef(uri=uri, step=step, manifest_sha256=""))
        sha256 = hashlib.sha256(body).hexdigest()
        ref = CheckpointRef(uri=uri, step=step, manifest_sha256=sha256)
        manifest, problem = _parsed(CheckpointManifest, body)
        if manifest is not None and manifest.step != step:
            problem = f"it says step {manifest.step} in the folder of step {step}"
        if manifest is None or problem:
            found = Candidate(
                checkpoint=ref, run_id="", trusted=False, manifest=ManifestState.UNREADABLE, detail=problem
            )
            return self._removed(bucket, folder, ref) or found
        trust, trust_problem = _parsed(TrustMark, self._read(bucket, folder + TRUSTED_NAME))
        foreign = trust is not None and trust.manifest_sha256 != sha256
        return Candidate(
            checkpoint=ref,
            run_id=manifest.run_id,
            trusted=trust is not None,
            revoked_by=self._revoked_by(bucket, folder),
            manifest=ManifestState.DIFFERENT if foreign else ManifestState.VERIFIED,
            detail=f"{TRUSTED_NAME} was given for another one" if foreign else trust_problem,
            written_at=manifest.created_at,
            ordered=manifest.ordered,
            answers_alarm_ids=manifest.answers_alarm_ids,
        )

    def _removed(self, bucket: str, folder: str, ref: CheckpointRef) -> Candidate | None:
        """What a revocation mark tells of a checkpoint that is gone or damaged: copies of it may be elsewhere.

        None where there is no mark: a manifest is written last, so without one there is no checkpoint yet.
        """
        mark, _ = _parsed(RevocationMark, self._read(bucket, folder + REVOKED_NAME))
        if mark is None:
            return None
        return Candidate(
            checkpoint=dataclasses.replace(ref, manifest_sha256=mark.manifest_sha256),
            run_id="",
            trusted=False,
            revoked_by=mark.incident_id,
            manifest=ManifestState.MISSING,
        )

    def _revoked_by(self, bucket: str, folder: str) -> str:
        mark, problem = _parsed(RevocationMark, self._read(bucket, folder + REVOKED_NAME))
        # A mark that cannot be read revokes too, whichever manifest it meant: the ranks decide in the same way.
        return f"an unknown one ({REVOKED_NAME}: {problem})" if problem else mark.incident_id if mark else ""

    def _read(self, bucket: str, key: str) -> bytes | None:
        # Looked up by listing first: to a role whose listing is limited to a prefix, S3 answers 403 for a missing
        # object, and a mark that may not be read must never pass for one that is not there.
        with transient_errors():
            found = self._s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", ())
        if not any(entry["Key"] == key for entry in found):
            return None
        try:
            with transient_errors():
                body: bytes = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        except ClientError as error:
            if error_code(error) in _MISSING_CODES:
                return None
            raise
        return body

    def _sizes(self, bucket: str, folder: str) -> Iterator[tuple[str, int]]:
        with transient_errors():
            for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=folder):
                for entry in page.get("Contents", ()):
                    yield entry["Key"], entry["Size"]

    def _check_granted(self, bucket: str, prefix: str) -> None:
        location = f"{bucket}/{prefix}".rstrip("/") + "/"
        if not any(location.startswith(granted.rstrip("/") + "/") for granted in self._locations):
            raise SettingsError(
                f"checkpoints under {location} are outside checkpoint_buckets of this cluster "
                f"({', '.join(self._locations) or 'none'}): add the bucket to the 'clusters' context and deploy"
            )


def _parsed(cls: type[_T], body: bytes | None) -> tuple[_T | None, str]:
    """The document, or None and why; None and nothing where there is none."""
    if body is None:
        return None, ""
    try:
        return from_json(cls, parse_json(body)), ""
    except (ValueError, ContractError) as error:
        return None, str(error)


def _with_record(candidate: Candidate, revoked: Collection[CheckpointRef]) -> Candidate:
    """The candidate, revoked where the table says so: its mark may have been removed."""
    if candidate.revoked_by or candidate.checkpoint not in revoked:
        return candidate
    return dataclasses.replace(candidate, revoked_by=EARLIER)


def _from_events(recorded: Iterable[RecordedCheckpoint]) -> tuple[Candidate, ...]:
    entries = sorted(recorded, key=lambda entry: entry.event.at)
    live = {entry.event.checkpoint.uri: entry.event.checkpoint.manifest_sha256 for entry in entries}
    return _newest_first(
        Candidate(
            checkpoint=entry.event.checkpoint,
            run_id=entry.event.run.run_id,
            trusted=entry.trust == "trusted",
            revoked_by=EARLIER if entry.trust == "revoked" else "",
            manifest=ManifestState.OUT_OF_REACH
            if live[entry.event.checkpoint.uri] == entry.event.checkpoint.manifest_sha256
            else ManifestState.DIFFERENT,
            detail="a later checkpoint took its place",
            written_at=entry.event.at,
            ordered=entry.event.ordered,
            answers_alarm_ids=entry.event.answers_alarm_ids,
        )
        for entry in entries
    )


def _newest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=age, reverse=True))
