"""The discarded pass after a resume: without it the first reduction would sum in another order (docs/adr/0001)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from truestep import rng
from truestep.python_state import python_state_kept
from truestep.replay import ComputeLoss


def warm_up(ddp_model: DistributedDataParallel, batch: Any, compute_loss: ComputeLoss) -> None:
    """Forward and backward through DDP; then gradients, buffers, the modules' Python attributes and random numbers are
    as before. Collective.

    DDP rebuilds its buckets before the *next* forward, in the order in which this backward's gradients became ready.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in ddp_model.module.named_buffers()}
    state = rng.capture()
    with python_state_kept(ddp_model.module):
        compute_loss(ddp_model, batch).backward()  # type: ignore[no-untyped-call]
    for parameter in ddp_model.parameters():
        parameter.grad = None
    with torch.no_grad():
        for name, buffer in ddp_model.module.named_buffers():
            buffer.copy_(buffers[name])
    rng.restore(state)
