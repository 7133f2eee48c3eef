"""Which of this attempt's checkpoints are trusted, and for which faults. Kept on rank 0."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import Any

from truestep.checkpoints.catalogue import Trust, hit_probability_for, read_record
from truestep.checkpoints.errors import CheckpointError
from truestep.checkpoints.storage import Storage
from truestep.contract import TRUSTED_NAME, CheckpointRef, Step, TrustMark, canonical_bytes, to_json
from truestep.report.reporter import EventReporter

_LOG = logging.getLogger("truestep.checkpoints")


class TrustLedger:
    """Marks checkpoints trusted, from the training's thread and from the one that completes a save."""

    def __init__(self, storage: Storage, reporter: EventReporter, risk: float) -> None:
        """risk: see `hit_probability_for`."""
        self._storage = storage
        self._reporter = reporter
        self._risk = risk
        self._lock = threading.Lock()
        self._written: list[tuple[CheckpointRef, str]] = []
        self._last_written: CheckpointRef | None = None
        self._clean_through: Step | None = None
        self._news: list[CheckpointRef] = []

    def note_written(self, ref: CheckpointRef, weights_fingerprint: str) -> None:
        """A checkpoint is complete. An audit may have passed while it was written: then it is marked at once."""
        with self._lock:
            self._last_written = ref
            self._written.append((ref, weights_fingerprint))
            self._settle()

    def promote(self, clean_through: Step) -> list[Any]:
        """An audit passed at `clean_through`. The references, as JSON, of what became trusted since the last call."""
        with self._lock:
            self._clean_through = clean_through
            self._settle()
        return self.news()

    def news(self) -> list[Any]:
        """The references, as JSON, of what became trusted since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return [to_json(ref) for ref in news]

    def taken(self, directory: str) -> CheckpointRef | None:
        """The checkpoint in `directory` if it is complete."""
        with self._lock:
            last = self._last_written
        return last if last is not None and last.uri.endswith(f"/{directory}") else None

    def _settle(self) -> None:
        limit = self._clean_through
        if limit is None:
            return
        waiting = [entry for entry in self._written if entry[0].step > limit]
        for ref, weights_fingerprint in self._written:
            if ref.step <= limit and not self._mark(ref, weights_fingerprint, limit):
                waiting.append((ref, weights_fingerprint))
        self._written = waiting

    def _mark(self, ref: CheckpointRef, weights_fingerprint: str, clean_through: Step) -> bool:
        """False where the mark could not be written and is to be tried again."""
        directory = ref.uri.rsplit("/", 1)[1]
        try:
            record = read_record(self._storage, directory)
            if record is None or record.ref != ref or record.trust is Trust.REVOKED:
                _LOG.warning("checkpoint %s is not promoted: it was removed, changed or revoked", ref.uri)
                return True
            mark = TrustMark(
                manifest_sha256=ref.manifest_sha256,
                step=ref.step,
                clean_through=clean_through,
                assumed_hit_probability=hit_probability_for(1, self._risk),
                risk=self._risk,
                promoted_at=now(),
            )
            self._storage.replace(f"{directory}/{TRUSTED_NAME}", canonical_bytes(mark))
        except CheckpointError as error:
            _LOG.warning("checkpoint %s could not be marked trusted and is tried again: %s", ref.uri, error)
            return False
        self._reporter.checkpoint_trusted(ref, weights_fingerprint, clean_through)
        self._news.append(ref)
        return True


def now() -> str:
    """The time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
