"""Early stopping by an exception that every rank raises alike, and a second `train` in the same processes."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.scenarios import Run, next_token_loss
from truestep import Schedule, train

pytestmark = pytest.mark.distributed

STEP = 2
WAIT_SECONDS = 30.0


class ConvergedError(Exception):
    """What a user's callback raises to stop early."""


def stopped_early_and_trained_again(rank: int) -> dict[str, Any]:
    """What each of two loops raised, and how long the second took to."""
    run = Run(rank)
    assert run.attachment is not None

    def stop(step: int, _loss: Tensor) -> None:
        if step == STEP:
            raise ConvergedError("the loss is low enough")

    raised = []
    for on_step in (stop, None):
        began = time.monotonic()
        try:
            train(
                run.ddp,
                run.attachment,
                run.optimizer,
                run.batches(STEP + 2),
                next_token_loss,
                None,
                None,
                Schedule(audit_every=None),
                on_step=on_step,
            )
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
    return {"raised": raised, "seconds": time.monotonic() - began}


def rank_that_trains_again(rank: int, directory: str) -> None:
    """A process of its own: its group is given up in it, so that no fixture could end it with a barrier."""
    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=f"node-{rank}", TRUESTEP_RUN_ID="run", TRUESTEP_OUTBOX_DIR=f"{directory}/outbox")
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/none.json"
    timeout = timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=timeout)
    result = stopped_early_and_trained_again(rank)
    (Path(directory) / f"result-{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def test_a_second_train_after_an_error_of_every_rank_is_refused_at_once_on_every_rank(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    children = [process_context.Process(target=rank_that_trains_again, args=(rank, str(tmp_path))) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(2 * WAIT_SECONDS)
        child.kill()
    for rank in range(2):
        result = json.loads((tmp_path / f"result-{rank}.json").read_text())
        (first, _), (second, text) = result["raised"]
        assert (first, second) == (ConvergedError.__name__, "LeftError")
        assert "ConvergedError: the loss is low enough" in text
        assert "start the processes again" in text
        assert result["seconds"] < 1.0, "nobody waits for a rank that refuses"
