"""Where a guard saves, and what a passed audit says of what was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truestep.attachment import Attachment
from truestep.contract import Step
from truestep.protocols import CheckpointStore, SaveEvidence

SaveCheckpoint = CheckpointStore | Callable[[Step], Any]


class CheckpointSaves:
    """The checkpoints of one guarded model, if it saves any."""

    def __init__(self, attachment: Attachment, checkpoints: SaveCheckpoint | None) -> None:
        """checkpoints: as the guard takes it."""
        self._attachment = attachment
        self._checkpoints = checkpoints
        self._verified = False

    @property
    def wanted(self) -> bool:
        """Whether there is anything to save with."""
        return self._checkpoints is not None

    def store(self) -> CheckpointStore | None:
        """The store, where it is one; None for a plain function."""
        return self._checkpoints if isinstance(self._checkpoints, CheckpointStore) else None

    def save(self, step: Step, evidence: Callable[[], SaveEvidence]) -> None:
        """Save `step`. Every rank, after its copies were compared."""
        if isinstance(self._checkpoints, CheckpointStore):
            self._checkpoints.save(evidence())
        elif self._checkpoints is not None:
            self._checkpoints(step)

    def settle_trust(self, step: Step) -> None:
        """An audit passed: checkpoints up to `step` are trusted, and a resume is verified by its first one."""
        store = self.store()
        if store is not None:
            store.promote(step)
        resumed = self._attachment.resumed
        if resumed is not None and not self._verified:
            self._verified = True
            if self._attachment.rank == 0 and resumed.checkpoint is not None:
                self._attachment.reporter.verified(resumed, step)
