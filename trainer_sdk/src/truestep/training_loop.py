"""A thin training loop over the guard. People with a loop of their own use `Guard` directly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import Attachment
from truestep.bundle.settings import BundleSettings
from truestep.contract import Alarm, Step, TruestepError
from truestep.guard import CorruptionDetected, Guard
from truestep.loss import require_scalar
from truestep.peer_failure import PeerFailedError
from truestep.protocols import FinishingStore
from truestep.replay import ComputeLoss, RebuildBatch
from truestep.saving import SaveCheckpoint
from truestep.schedule import Schedule

_BUNDLES = BundleSettings()


class LeftError(TruestepError):
    """`train` was left over an error before, on this attachment; the ranks no longer work with each other."""


def train(
    ddp_model: DistributedDataParallel,
    stats: Attachment,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    compute_loss: ComputeLoss,
    rebuild_batch: RebuildBatch | None,
    save_checkpoint: SaveCheckpoint | None,
    schedule: Schedule,
    *,
    start_step: int = 0,
    on_step: Callable[[int, torch.Tensor], None] | None = None,
    bundles: BundleSettings | None = _BUNDLES,
    preflight: bool = False,
) -> Alarm | None:
    """Train until `batches` ends or a check finds corruption; then the alarm, the same on every rank. It does not hold.

    batches: yields the batch of `start_step` first; every rank must yield equally many, else every rank raises
    `PeerFailedError`.
    start_step: above 0 the run was resumed, and a discarded warm-up pass comes first (docs/adr/0001).
    preflight: as the guard takes it.
    bundles: as the guard takes it.
    on_step(step, loss): after each step whose checks passed; the loss is this rank's, detached.
    An exception on one rank reaches the others as `PeerFailedError`, which names that rank and its step. Whoever
    catches one and trains again with this attachment gets `LeftError`, on every rank that was left that way.
    """
    _refuse_after(stats.left_over)
    guard = Guard(
        ddp_model,
        optimizer,
        schedule,
        attachment=stats,
        compute_loss=compute_loss,
        rebuild_batch=rebuild_batch,
        checkpoints=save_checkpoint,
        bundles=bundles,
        preflight=preflight,
    )
    try:
        for step, batch in enumerate(stats.peers.fetching(batches, Step(start_step)), start=start_step):
            if step == start_step and start_step > 0:
                stats.current_step = Step(step)
                stats.peers.open_step(stats.current_step)
                guard.warm_up(batch)
            optimizer.zero_grad(set_to_none=True)
            guard.start_step(step, batch)
            loss = require_scalar(compute_loss(ddp_model, batch))
            loss.backward()  # type: ignore[no-untyped-call]
            guard.before_update(loss)
            optimizer.step()
            guard.after_update()
            if on_step is not None:
                on_step(step, loss.detach())
        stats.peers.end_loop()
        if isinstance(save_checkpoint, FinishingStore):
            save_checkpoint.finish()
    except CorruptionDetected as detected:
        return detected.alarm
    except BaseException as error:
        if stats.world_size > 1 and (not isinstance(error, TruestepError) or isinstance(error, PeerFailedError)):
            stats.left_over = f"{type(error).__name__}: {error}"[:300]
        stats.peers.tell(error)
        failure = stats.peers.cause_of(error)
        if failure is not None:
            raise PeerFailedError(failure) from error
        raise
    finally:
        guard.leave_step()
    return None


def _refuse_after(left_over: str) -> None:
    """Where all ranks raised alike, one has told the others, whose group is given up: it would wait for them alone."""
    if left_over:
        raise LeftError(
            f"train() was left over an error in this process ({left_over}), and the ranks have given up waiting for "
            "each other since: start the processes again. To end a run early, let every rank's batches end at the same "
            "step: train() returns then, and can be called again"
        )
