"""The order to resume: the recovery's, in a file of the pod, or a person's, below the checkpoint root. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from truestep.checkpoints.catalogue import CheckpointRecord, Trust, read_tombstone
from truestep.checkpoints.errors import CheckpointError
from truestep.checkpoints.storage import Storage
from truestep.contract import (
    ContractError,
    ResumeDirective,
    UnknownVersionError,
    canonical_bytes,
    from_json,
)

DIRECTIVE_PATH = "/etc/truestep/resume.json"
ORDER_NAME = "resume.json"
"""Below the checkpoint root: what `order_start` writes, so that it reaches the next start wherever that runs."""
ORDER_COMMAND = "truestep checkpoints start-from"


def read_directive(environ: Mapping[str, str] | None = None) -> ResumeDirective | None:
    """The recovery's order, from the file that ``TRUESTEP_DIRECTIVE`` names (default `DIRECTIVE_PATH`), or None.

    A missing file means that there is no order. One that cannot be read or understood raises `ContractError`: starting
    from somewhere else would be worse than not starting. environ: default `os.environ`.
    """
    env = os.environ if environ is None else environ
    path = Path(env.get("TRUESTEP_DIRECTIVE") or DIRECTIVE_PATH)
    advice = "correct the ConfigMap truestep-resume-<job>, or remove it to start from the newest trusted checkpoint"
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ContractError(f"resume directive {path} cannot be read: {error}; {advice}") from error
    return _parsed(content, str(path), advice)


def directive_in_force(storage: Storage) -> ResumeDirective | None:
    """The pod's directive or the one below the checkpoint root, whichever was issued later; None without either.

    Raises `ContractError` for one that cannot be understood.
    """
    mounted, where = read_directive(), f"{storage.root_uri}/{ORDER_NAME}"
    content = storage.read(ORDER_NAME)
    if content is None:
        return mounted
    ordered = _parsed(content, where, f"remove it, or write it again with `{ORDER_COMMAND} <checkpoint>`")
    if mounted is None or _issued(ordered, where) > _issued(mounted, "the pod's resume directive"):
        return ordered
    return mounted


def order_start(storage: Storage, record: CheckpointRecord, *, now: datetime | None = None) -> ResumeDirective:
    """Order the next start to resume from this checkpoint, and from nothing newer; it answers the run's tombstone.

    Writes `ORDER_NAME` below the root; an order that was there is replaced. Raises `CheckpointError` for a checkpoint
    that no start would take.
    """
    if record.trust in (Trust.REVOKED, Trust.UNREADABLE):
        raise CheckpointError(
            f"{record.ref.uri} is {record.trust}: {record.reason}; every start would refuse it, choose an older one"
        )
    issued, tombstone = now or datetime.now(UTC), read_tombstone(storage)
    if tombstone is not None:
        # This machine's clock may be behind that of the rank which left the tombstone; an answer comes later.
        issued = max(issued, datetime.fromisoformat(tombstone.at) + timedelta(milliseconds=1))
    directive = ResumeDirective(
        incident_id=f"by-hand-{issued:%Y%m%dT%H%M%S}",
        checkpoint_uri=record.ref.uri,
        manifest_sha256=record.ref.manifest_sha256,
        max_step=record.ref.step,
        issued_at=issued.isoformat(timespec="milliseconds"),
    )
    storage.replace(ORDER_NAME, canonical_bytes(directive))
    return directive


def _parsed(content: bytes, where: str, advice: str) -> ResumeDirective:
    try:
        return from_json(ResumeDirective, json.loads(content.decode("utf-8")))
    except UnknownVersionError as error:
        raise UnknownVersionError(f"resume directive {where}: {error}") from error
    except (ValueError, ContractError) as error:
        raise ContractError(f"resume directive {where}: {error}; {advice}") from error


def _issued(directive: ResumeDirective, where: str) -> datetime:
    """When; one that does not say is older than any that does."""
    if not directive.issued_at:
        return datetime.min.replace(tzinfo=UTC)
    try:
        issued = datetime.fromisoformat(directive.issued_at)
    except ValueError as error:
        raise ContractError(f"{where}: issued_at is {directive.issued_at!r}: {error}; give ISO 8601 in UTC") from error
    return issued if issued.tzinfo is not None else issued.replace(tzinfo=UTC)
