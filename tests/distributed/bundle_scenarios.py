"""Runs that end in an audit's alarm and leave a bundle; and the factory that `truestep confirm` builds the model
with."""

from __future__ import annotations

import os
import threading
from typing import Any

from torch import nn

from tests.distributed.scenarios import Run, Transformer, micro_batch, next_token_loss
from truestep.bundle import BundleSettings, writing
from truestep.inject import Fault, arm
from truestep.schedule import Schedule
from truestep.training_loop import train

FACTORY = "tests.distributed.bundle_scenarios:build"


def build() -> tuple[nn.Module, Any]:
    """What a user names in `BundleSettings.model`."""
    return Transformer(), next_token_loss


def bundled_run(
    rank: int, faulty_rank: int, fault: dict[str, Any], root_uri: str, *, hangs: bool = False, timeout: float = 60.0
) -> dict[str, Any]:
    """Train with a fault in one rank. hangs: the storage never answers."""
    if hangs:
        writing.open_storage = lambda _uri: threading.Event().wait()  # type: ignore[assignment,return-value]
    run = Run(rank)
    assert run.attachment is not None
    if rank == faulty_rank:
        arm(run.ddp, run.optimizer, Fault.from_json(fault))
    alarm = train(
        run.ddp,
        run.attachment,
        run.optimizer,
        run.batches(6),
        next_token_loss,
        micro_batch,
        None,
        Schedule(audit_every=3, check_every=3),
        bundles=BundleSettings(model=FACTORY, root_uri=root_uri, timeout_seconds=timeout),
    )
    outbox = os.environ["TRUESTEP_OUTBOX_DIR"]
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "outbox": len(os.listdir(outbox)) if os.path.isdir(outbox) else 0,  # noqa: PTH112, PTH208
    }
