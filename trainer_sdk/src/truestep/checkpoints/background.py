"""Saves with `torch.distributed.checkpoint`, which runs collectives of its own: over a group that nothing else uses."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException

from truestep.checkpoints.errors import CheckpointError
from truestep.checkpoints.ranks import Attached, attempt_on_every_rank
from truestep.checkpoints.sharded_files import VerifiedWriter, every_cause, save_in_background, save_together
from truestep.collectives import CpuGroup
from truestep.contract import Step


class DistributedSaves:
    """One save at a time, together or in the background. Every method is called by every rank, at the same step."""

    def __init__(self, attachment: Attached, *, in_background: bool) -> None:
        """Collective. in_background: `save` returns once the state is copied."""
        self._attachment = attachment
        self._in_background = in_background
        # The background's collectives would meet the training's in another order on every rank.
        self._group = CpuGroup(cast(CpuGroup, attachment.cpu_group).group).group
        self._pending: Future[Any] | None = None
        self._refusal = ""
        self._step = Step(0)
        self.directory = ""
        """Of the save in progress, or empty."""

    def save(self, step: Step, directory: str, state: dict[str, Any], writer: VerifiedWriter) -> list[str]:
        """Start a save, and end it unless in the background. A sentence for every rank that failed."""
        self._step, self.directory = step, directory
        if self._in_background:
            return self._save_in_background(state, writer)
        _, failures, _ = attempt_on_every_rank(
            self._attachment, lambda: _plainly(lambda: save_together(state, writer, self._group))
        )
        self.directory = ""
        return failures

    def wait(self) -> tuple[Step, list[str]]:
        """(step, a sentence for every rank that failed) of the save in the background, once it has ended."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self._step, []
        _, failures, _ = attempt_on_every_rank(self._attachment, lambda: _plainly(lambda: pending.result() and None))
        self.directory = ""
        return self._step, failures

    def _save_in_background(self, state: dict[str, Any], writer: VerifiedWriter) -> list[str]:
        if self._refusal:
            return [self._refusal]
        _, failures, started = attempt_on_every_rank(self._attachment, lambda: self._start(state, writer))
        if failures:
            # `wait` is a collective: what only some ranks have begun must not lead only these into it.
            self._pending = None
            if any(started):
                # Their threads sit in a collective of the group that the other ranks will never enter.
                self._refusal = (
                    f"the save in the background of step {self._step} began on some ranks only, and these still wait "
                    f"for the others ({'; '.join(failures)}): no further one can be made by these processes; "
                    "restart the training, with asynchronous=False where host memory has no room for a copy"
                )
            else:
                self.directory = ""
        return failures

    def _start(self, state: dict[str, Any], writer: VerifiedWriter) -> bool:
        self._pending = save_in_background(state, writer, self._group)
        return True


def _plainly(act: Any) -> None:
    """torch raises a `BaseException` that holds every rank's failure."""
    try:
        act()
    except CheckpointException as failed:
        raise CheckpointError(every_cause(failed)) from failed
