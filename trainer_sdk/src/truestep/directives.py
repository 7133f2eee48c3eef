"""The order to resume: the recovery's, in a file of the pod, or a person's, below the checkpoint root. No torch."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from truestep.checkpoints.catalogue import CheckpointRecord, Trust, read_tombstone
from truestep.checkpoints.errors import CheckpointError, ResumeError
from truestep.checkpoints.storage import Storage
from truestep.contract import (
    ContractError,
    ResumeDirective,
    Tombstone,
    UnknownVersionError,
    canonical_bytes,
    directive_sha256,
    from_json,
    parse_json,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

DIRECTIVE_PATH = "/etc/truestep/resume.json"
ORDER_NAME = "resume.json"
"""Below the checkpoint root: what `order_start` writes, so that it reaches the next start wherever that runs."""
FOLLOWED_NAME = "followed.json"
"""Below the checkpoint root: which of the recovery's directives a start followed last, so that an order can name it."""
ORDER_COMMAND = "truestep checkpoints start-from"


def read_directive(environ: Mapping[str, str] | None = None) -> ResumeDirective | None:
    """The recovery's order, from the file that ``TRUESTEP_DIRECTIVE`` names (default `DIRECTIVE_PATH`), or None.

    A missing file means that there is no order. One that cannot be read or understood raises `ContractError`: starting
    from somewhere else would be worse than not starting. environ: default `os.environ`.
    """
    path = _directive_path(environ)
    advice = "correct the ConfigMap truestep-resume-<job>, or remove it to start from the newest trusted checkpoint"
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ContractError(f"resume directive {path} cannot be read: {error}; {advice}") from error
    return _parsed(ResumeDirective, content, f"resume directive {path}", advice)


def _directive_path(environ: Mapping[str, str] | None = None) -> Path:
    env = os.environ if environ is None else environ
    return Path(env.get("TRUESTEP_DIRECTIVE") or DIRECTIVE_PATH)


@dataclass(frozen=True, kw_only=True)
class StartOrder:
    """Content of `ORDER_NAME`: a person's order, what it answers, and what became of it.

    Clocks of different machines do not say which of two decisions is newer; what each of them had seen does.
    """

    schema_version: int = 1
    directive: ResumeDirective
    """It answers the alarm of the tombstone that lay there when the order was given; another one voids the order."""
    seen_directive_sha256: str = ""
    """`directive_sha256` of the recovery's directive that a start had followed last when the order was given."""
    followed_at: str = ""
    """When a start first followed it, ISO 8601, UTC; empty before."""
    followed_by: str = ""
    """Attempt id of that start."""
    ended: str = ""
    """Why it is over for good, as a sentence; empty while it may be in force."""


@dataclass(frozen=True, kw_only=True)
class FollowedDirective:
    """Content of `FOLLOWED_NAME`: the recovery's directive that a start followed last."""

    schema_version: int = 1
    directive_sha256: str
    incident_id: str
    at: str
    by: str
    """Attempt id of the start."""


def read_order(storage: Storage) -> StartOrder | None:
    """The order by hand below the root, over or not; None where none was given. Raises `ContractError`."""
    content, where = storage.read(ORDER_NAME), f"{storage.root_uri}/{ORDER_NAME}"
    advice = f"remove it, or write it again with `{ORDER_COMMAND} <checkpoint>`"
    return None if content is None else _parsed(StartOrder, content, f"order to start {where}", advice)


def directive_in_force(storage: Storage, given: ResumeDirective | None = None) -> ResumeDirective | None:
    """What the next start must follow: the order by hand, or the recovery's directive; None without either.

    An order holds until a tombstone that it does not answer, or until a later directive; it is ended then, durably.
    given: the training script's own directive, which goes before both.

    Raises `ContractError` for one that cannot be understood, and `ResumeError` where an order and a directive of the
    recovery are there and nothing tells which is newer.
    """
    order = read_order(storage)
    if given is not None:
        if order is not None and not order.ended:
            _end(storage, order, f"the training script gave resume() the directive of {given.incident_id} instead")
        return given
    mounted = read_directive()
    if order is None or order.ended:
        return mounted
    tombstone = read_tombstone(storage)
    if tombstone is not None and not answers(order.directive, tombstone):
        _end(storage, order, f"it {_what_it_answers(order.directive)}, and alarm {tombstone.alarm_id} came later")
        return mounted
    if mounted is None or directive_sha256(mounted) == order.seen_directive_sha256:
        return order.directive
    if order.followed_at and _time(mounted.issued_at) > _time(order.followed_at):
        # Not by clocks alone: the starts that followed the order did not see this directive either.
        _end(storage, order, f"incident {mounted.incident_id} ordered another start later, at {mounted.issued_at}")
        return mounted
    raise ResumeError(_conflict(storage, order, mounted))


def order_start(storage: Storage, record: CheckpointRecord, *, now: datetime | None = None) -> StartOrder:
    """Order the next start to resume from this checkpoint, and from nothing newer; it answers the run's tombstone.

    Writes `ORDER_NAME` below the root; an order that was there is replaced. Raises `CheckpointError` for a checkpoint
    that no start would take.
    """
    if record.trust in (Trust.REVOKED, Trust.UNREADABLE):
        raise CheckpointError(
            f"{record.ref.uri} is {record.trust}: {record.reason}; every start would refuse it, choose an older one"
        )
    issued, tombstone, followed = now or datetime.now(UTC), read_tombstone(storage), _read_followed(storage)
    directive = ResumeDirective(
        # Ordered twice within the clock's resolution, the checkpoint is ordered anew all the same.
        incident_id=f"by-hand-{issued:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}",
        checkpoint_uri=record.ref.uri,
        manifest_sha256=record.ref.manifest_sha256,
        max_step=record.ref.step,
        answers_alarm_ids=(tombstone.alarm_id,) if tombstone else (),
        issued_at=_iso(issued),
    )
    order = StartOrder(directive=directive, seen_directive_sha256=followed.directive_sha256 if followed else "")
    storage.replace(ORDER_NAME, canonical_bytes(order))
    return order


def answers(directive: ResumeDirective, tombstone: Tombstone) -> bool:
    """Whether a start may follow the directive over this tombstone. Looks at no clock."""
    return tombstone.alarm_id in directive.answers_alarm_ids


def why_unanswered(directive: ResumeDirective, tombstone: Tombstone) -> str:
    """A sentence's end that says why the directive does not let a start over this tombstone."""
    return (
        f"the resume directive of {directive.incident_id} {_what_it_answers(directive)}, not alarm {tombstone.alarm_id}"
    )


def _what_it_answers(directive: ResumeDirective) -> str:
    alarms = directive.answers_alarm_ids
    return f"answers alarm {', '.join(alarms)}" if alarms else "answers no alarm"


def why_over(storage: Storage, tombstone: Tombstone) -> str:
    """A sentence where this tombstone ended an order by hand, else empty."""
    order = read_order(storage)
    ended = order is not None and tombstone.alarm_id in order.ended
    return f"the order {order.directive.incident_id} is over: {order.ended}" if order is not None and ended else ""


def note_followed(storage: Storage, directive: ResumeDirective, attempt_id: str) -> None:
    """A start has loaded what `directive` orders: say so durably, for an order given later and for the next start."""
    order, now = read_order(storage), _iso(datetime.now(UTC))
    if order is not None and order.directive == directive:
        if not order.followed_at:
            followed = dataclasses.replace(order, followed_at=now, followed_by=attempt_id)
            storage.replace(ORDER_NAME, canonical_bytes(followed))
    elif directive == read_directive():
        record = FollowedDirective(
            directive_sha256=directive_sha256(directive),
            incident_id=directive.incident_id,
            at=now,
            by=attempt_id,
        )
        storage.replace(FOLLOWED_NAME, canonical_bytes(record))


def _read_followed(storage: Storage) -> FollowedDirective | None:
    content, where = storage.read(FOLLOWED_NAME), f"{storage.root_uri}/{FOLLOWED_NAME}"
    advice = "remove it; the order then counts as given without knowledge of the recovery's directive"
    return None if content is None else _parsed(FollowedDirective, content, where, advice)


def _end(storage: Storage, order: StartOrder, why: str) -> None:
    if read_order(storage) == order:  # else a person has given a new one meanwhile
        ended = f"{why} (found at {_iso(datetime.now(UTC))})"
        storage.replace(ORDER_NAME, canonical_bytes(dataclasses.replace(order, ended=ended)))
    _LOG.warning("the order %s in %s/%s is over: %s", order.directive.incident_id, storage.root_uri, ORDER_NAME, why)


def _conflict(storage: Storage, order: StartOrder, mounted: ResumeDirective) -> str:
    mine, where = order.directive, f"{storage.root_uri}/{ORDER_NAME}"
    return (
        f"two orders say where to start, and which is newer cannot be told, since neither knew of the other: {where} "
        f"orders step {mine.max_step} ({mine.incident_id}, {mine.checkpoint_uri}), and the recovery's directive "
        f"{_directive_path()} orders step {mounted.max_step} (incident {mounted.incident_id}, "
        f"{mounted.checkpoint_uri}). To follow the recovery, remove {where}; to follow the order by hand, remove the "
        "ConfigMap truestep-resume-<job>; then start again. Nothing was started"
    )


def _parsed(cls: type[T], content: bytes, what: str, advice: str) -> T:
    try:
        return from_json(cls, parse_json(content.decode("utf-8")))
    except UnknownVersionError as error:
        raise UnknownVersionError(f"{what}: {error}") from error
    except (ValueError, ContractError) as error:
        raise ContractError(f"{what}: {error}; {advice}") from error


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="milliseconds")


def _time(text: str) -> datetime:
    """When; what does not say, or not understandably, is older than all that does."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
