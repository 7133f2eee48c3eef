"""Sends what happened to the event bus: outbox first, then a background thread; training never waits on the network."""

from __future__ import annotations

import atexit
import logging
import os
import random
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from truestep.contract import (
    INCIDENT_ID,
    Alarm,
    CheckpointEvent,
    CheckpointRef,
    ContractError,
    DetailType,
    IdentityRow,
    ResumeDirective,
    ResumeEvent,
    RunRef,
    Step,
    canonical_bytes,
    ordered_checkpoint,
    sha256_hex,
    to_json,
    training_source,
)
from truestep.protocols import ResumePoint
from truestep.report.event_bus import BusUnavailableError, EventBus, Outcome, batches, place_of
from truestep.report.outbox import Outbox, OutboxEntry
from truestep.report.size import fitted

_LOG = logging.getLogger("truestep.report")
NODES = 64
"""Node names in a resume event."""
IDENTITY_VARIABLES = (
    "NODE_NAME", "POD_NAME", "POD_UID", "POD_NAMESPACE", "TRUESTEP_JOB_NAME", "TRUESTEP_RUN_ID",
    "TRUESTEP_CLUSTER_ARN", "AWS_REGION", "TRUESTEP_CHECKPOINT_ROOT",
)  # fmt: skip
"""What the recovery needs to know of a pod that reports to it."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how soon an event is sent again before it rests in the outbox until the next occasion.

    Occasions: another event, `flush`, every line of the hold, the next start of the job.
    """

    attempts: int = 8
    base_seconds: float = 0.2
    cap_seconds: float = 30.0

    def delay_seconds(self, attempt: int, jitter: random.Random) -> float:
        """Wait before attempt number `attempt` (1 is the first retry): exponential, the upper half of it random."""
        ceiling: float = min(self.cap_seconds, self.base_seconds * 2.0 ** (attempt - 1))
        return ceiling * jitter.uniform(0.5, 1.0)


class EventReporter:
    """The `Reporter` of one process. No method raises; what cannot be sent stays in the outbox."""

    def __init__(
        self,
        identity: IdentityRow,
        run: RunRef,
        outbox: Outbox,
        bus: EventBus | None,
        *,
        retry: RetryPolicy | None = None,
        alarm_wait_seconds: float = 10.0,
    ) -> None:
        """bus: None leaves every event in the outbox. alarm_wait_seconds: how long `alarm` waits to be accepted."""
        self.rank = identity.rank
        self.run = run
        self.outbox = outbox
        self.bus = bus
        self._retry = retry or RetryPolicy()
        self._alarm_wait_seconds = alarm_wait_seconds
        self._jitter = random.Random(f"{run.attempt_id}/{identity.rank}")  # noqa: S311 - spreads retries, hides nothing
        self._nodes: tuple[str, ...] = ()
        self._directive: ResumeDirective | None = None
        self._changed = threading.Condition()
        self._queue: dict[str, OutboxEntry] = {}
        self._accepted: set[str] = set()
        self._nudges = 0
        self._closed = False
        self._complaints: dict[tuple[str, str], str] = {}
        """Place -> what was last said of it."""
        self._lasting = False
        self._thread: threading.Thread | None = None
        if self.rank == 0:
            self.retry_all()

    def alarm(self, alarm: Alarm, *, wait: bool = True) -> None:
        """Write the alarm to the outbox, then wait a bounded time until the bus has accepted it.

        The wait ends early where the bus cannot take it before somebody does something: it is sent again all the same.
        """

        def entry() -> OutboxEntry:
            run = (
                alarm.run if alarm.run.checkpoint_root else replace(alarm.run, checkpoint_root=self.run.checkpoint_root)
            )
            detail = fitted(replace(alarm, run=run)).to_json()
            return _entry(DetailType.ALARM, alarm.alarm_id, detail, alarm.detected_at)

        event_id = self._report(entry)
        if wait and event_id and self.bus is not None:
            with self._changed:
                settled = self._changed.wait_for(
                    lambda: event_id not in self._queue or self._lasting, self._alarm_wait_seconds
                )
            if not settled:
                _LOG.error(
                    "alarm %s was not accepted within %.0f s; it is in the outbox %s and is sent again",
                    alarm.alarm_id,
                    self._alarm_wait_seconds,
                    self.outbox.directory,
                )

    def checkpoint_written(self, checkpoint: CheckpointRef, weights_fingerprint: str) -> None:
        """A checkpoint is complete."""
        self._checkpoint(DetailType.CHECKPOINT_WRITTEN, checkpoint, weights_fingerprint, None)

    def checkpoint_trusted(self, checkpoint: CheckpointRef, weights_fingerprint: str, clean_through: Step) -> None:
        """An audit has passed at or after a checkpoint's step."""
        self._checkpoint(DetailType.CHECKPOINT_TRUSTED, checkpoint, weights_fingerprint, clean_through)

    def resumed(self, point: ResumePoint, nodes: Sequence[str] = ()) -> None:
        """A checkpoint is loaded and training starts. A start from nothing (no checkpoint) is not an event."""
        self._nodes = tuple(sorted(set(nodes))[:NODES])
        self._resume(DetailType.RESUMED, point, point.start_step)

    def verified(self, resumed: ResumePoint, step: Step) -> None:
        """The first audit since the resume passed, at `step`."""
        self._resume(DetailType.VERIFIED, resumed, step)

    def flush(self, timeout_seconds: float) -> bool:
        """Send what waits, for at most `timeout_seconds`. True if nothing of this process waits afterwards."""
        self._nudge()
        if self.bus is None:
            return not self._pending()
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_seconds)

    def retry_all(self) -> None:
        """Send everything that the outbox holds, from whichever rank or earlier start. Returns at once."""
        entries = self._pending()
        if entries and self.bus is not None:
            with self._changed:
                for entry in entries:
                    self._queue.setdefault(entry.event_id, entry)
        self._nudge()

    def was_accepted(self, event_id: str) -> bool:
        """Whether the bus has this alarm: from this process, or from any rank according to the outbox."""
        return event_id in self._accepted or self.outbox.was_accepted(event_id)

    def note_checkpoint_root(self, root_uri: str) -> None:
        """Where the run's checkpoints lie, for events of a run whose environment does not say."""
        if not self.run.checkpoint_root:
            self.run = replace(self.run, checkpoint_root=root_uri)

    def note_directive(self, directive: ResumeDirective) -> None:
        """Under which directive this attempt resumed, for the events of its checkpoints."""
        self._directive = directive

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Flush, then end the background thread."""
        if self._queue:
            self.flush(timeout_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _checkpoint(
        self, detail_type: DetailType, checkpoint: CheckpointRef, weights_fingerprint: str, clean_through: Step | None
    ) -> None:
        def entry() -> OutboxEntry:
            event = CheckpointEvent(
                run=self.run,
                checkpoint=checkpoint,
                weights_fingerprint=weights_fingerprint,
                clean_through=clean_through,
                ordered=ordered_checkpoint(self._directive) if self._directive else None,
                answers_alarm_ids=self._directive.answers_alarm_ids if self._directive else (),
                at=_now(),
            )
            event_id = sha256_hex([str(detail_type), checkpoint, self.run.attempt_id])[:32]
            return _entry(detail_type, event_id, to_json(event), event.at)

        self._report(entry)

    def _resume(self, detail_type: DetailType, point: ResumePoint, step: Step) -> None:
        checkpoint = point.checkpoint
        if checkpoint is None:
            return

        def entry() -> OutboxEntry:
            event = ResumeEvent(
                run=self.run,
                # An order by hand, and a directive of the script's own, are no incident's: nobody waits for the word.
                incident_id=point.incident_id if INCIDENT_ID.fullmatch(point.incident_id) else "",
                directive_sha256=point.directive_sha256,
                checkpoint=checkpoint,
                step=step,
                nodes=self._nodes,
                at=_now(),
            )
            event_id = sha256_hex([str(detail_type), self.run.attempt_id, point.incident_id, checkpoint, step])[:32]
            return _entry(detail_type, event_id, to_json(event), event.at)

        self._report(entry)

    def _report(self, build: Callable[[], OutboxEntry]) -> str:
        """Outbox, then queue. The event's id, or an empty string where the bus has it or nothing could be built."""
        try:
            entry = build()
        except Exception:
            _LOG.exception("an event could not be built; this is a bug in truestep")
            return ""
        try:
            if not self.outbox.put(entry):
                return ""
        except OSError:
            # The queue still holds it: a full disk must not silence an alarm.
            _LOG.exception("outbox %s cannot be written; the event is kept in memory only", self.outbox.directory)
        if self.bus is not None:
            with self._changed:
                self._queue[entry.event_id] = entry
            self._nudge()
        return entry.event_id

    def _pending(self) -> list[OutboxEntry]:
        try:
            return self.outbox.pending()
        except OSError:
            _LOG.exception("outbox %s cannot be read", self.outbox.directory)
            return []

    def _nudge(self) -> None:
        with self._changed:
            if not self._queue or self._closed:
                return
            self._nudges += 1
            if self._thread is None:
                thread = threading.Thread(target=self._send_forever, name="truestep-report", daemon=True)
                thread.start()  # may fail for want of memory: then the next occasion tries again
                self._thread = thread
            self._changed.notify_all()

    def _send_forever(self) -> None:
        attempt, seen = 0, 0
        while True:
            with self._changed:
                resting = not self._queue or attempt >= self._retry.attempts
                delay = None if resting else self._retry.delay_seconds(attempt, self._jitter) if attempt else 0.0
                self._changed.wait_for(partial(self._called_since, seen), delay)
                if self._closed:
                    return
                if self._nudges > seen:
                    attempt, seen = 0, self._nudges
                entries = sorted(self._queue.values(), key=lambda entry: (entry.created_at, entry.event_id))
            try:
                self._send(entries)
            except Exception:
                _LOG.exception("sending events failed unexpectedly; they stay in the outbox")
            attempt = attempt + 1 if self._queue else 0

    def _called_since(self, nudges: int) -> bool:
        return self._closed or self._nudges > nudges

    def _send(self, entries: Sequence[OutboxEntry]) -> None:
        bus = self.bus
        if bus is None:
            return
        for batch in batches([entry for entry in entries if not self._sent_elsewhere(entry)]):
            try:
                results = bus.send(batch)
            except BusUnavailableError as error:
                # The next batch may be of another source, which the bus does take.
                self._complain(error, place_of(batch[0]))
                continue
            self._complaints.pop(place_of(batch[0]), None)
            self._lasting &= place_of(batch[0]) != self._own_place
            for entry, result in zip(batch, results, strict=True):
                if result.outcome is Outcome.RETRY:
                    _LOG.warning("event %s (%s) was not accepted: %s", entry.event_id, entry.detail_type, result.reason)
                    continue
                self._settle(entry, result.outcome, result.reason)

    @property
    def _own_place(self) -> tuple[str, str]:
        return self.run.cluster_arn, self.run.namespace

    def _complain(self, error: BusUnavailableError, place: tuple[str, str]) -> None:
        """Once for each reason, until something was sent: the same line every second would hide the alarm's box."""
        with self._changed:
            known, self._complaints[place] = self._complaints.get(place), str(error)
            if place == self._own_place:
                self._lasting = error.lasting
            self._changed.notify_all()
        if known != str(error):
            _LOG.warning("%s. Until then events stay in the outbox %s", error, self.outbox.directory)

    def _sent_elsewhere(self, entry: OutboxEntry) -> bool:
        if not self.was_accepted(entry.event_id):
            return False
        self._settle(entry, Outcome.ACCEPTED, "")
        return True

    def _settle(self, entry: OutboxEntry, outcome: Outcome, reason: str) -> None:
        if outcome is Outcome.ACCEPTED and entry.detail_type is DetailType.ALARM:
            self._accepted.add(entry.event_id)  # known here even where the outbox cannot take the mark
        try:
            if outcome is Outcome.REFUSED:
                _LOG.error("the bus refuses event %s for good: %s", entry.event_id, reason)
                self.outbox.refuse(entry, reason)
            else:
                self.outbox.accept(entry)
        except OSError:
            _LOG.exception("outbox %s cannot be updated; the event may be sent twice", self.outbox.directory)
        with self._changed:
            self._queue.pop(entry.event_id, None)
            self._changed.notify_all()


_reporters: dict[tuple[str, str, int], EventReporter] = {}


def reporter_from_environment(
    identity: IdentityRow, run: RunRef, environ: Mapping[str, str] | None = None
) -> EventReporter:
    """The process's reporter of this attempt: the same object at every call. environ: default `os.environ`.

    Reads ``TRUESTEP_EVENT_BUS`` (unset: events stay in the outbox, said once) and ``TRUESTEP_OUTBOX_DIR`` (unset: below
    a ``file://`` checkpoint root, else a temporary directory, which does not outlive the node: said once).
    """
    env = os.environ if environ is None else environ
    directory, durable = _outbox_directory(env, run)
    key = (str(directory), run.attempt_id, int(identity.rank))
    if key not in _reporters:
        name = env.get("TRUESTEP_EVENT_BUS", "")
        bus = EventBus(name, region=run.region or env.get("AWS_REGION", "")) if name else None
        if not name and identity.rank == 0:
            _LOG.warning("TRUESTEP_EVENT_BUS is not set: alarms and events stay in the outbox %s", directory)
        unset = [variable for variable in IDENTITY_VARIABLES if not env.get(variable)]
        if name and unset and identity.rank == 0:
            _LOG.warning(
                "%s not set: the recovery refuses this run's alarms, or looks for the wrong node or checkpoint; "
                "docs/deploy.md says where each comes from",
                ", ".join(unset),
            )
        if name and identity.rank == 0 and run.cluster_arn and run.namespace:
            try:
                training_source(run.cluster_arn, run.namespace)
            except ContractError as error:
                _LOG.warning("nothing can be reported to the recovery: %s", error)
        if not durable and identity.rank == 0:
            _LOG.warning("TRUESTEP_OUTBOX_DIR is not set: the outbox %s does not outlive this node", directory)
        reporter = EventReporter(identity, run, Outbox(directory), bus)
        if not durable:
            atexit.register(reporter.outbox.remove_if_empty)
        atexit.register(reporter.close)  # the last that is registered comes first
        _reporters[key] = reporter
    return _reporters[key]


def latest_reporter() -> EventReporter | None:
    """The reporter that this process made last, or None."""
    return next(reversed(_reporters.values()), None)


def _outbox_directory(env: Mapping[str, str], run: RunRef) -> tuple[Path, bool]:
    configured = env.get("TRUESTEP_OUTBOX_DIR", "")
    if configured:
        return Path(configured), True
    root = urlsplit(run.checkpoint_root)
    if root.scheme == "file":
        return Path(unquote(root.path)) / "outbox", True
    return Path(tempfile.gettempdir()) / f"truestep-outbox-{sha256_hex(run.run_id)[:12]}", False


def _entry(detail_type: DetailType, event_id: str, detail: Mapping[str, object], created_at: str) -> OutboxEntry:
    canonical_bytes(detail)  # raises here, where it is caught, for what JSON cannot carry
    return OutboxEntry(event_id=event_id, detail_type=detail_type, detail=detail, created_at=created_at)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
