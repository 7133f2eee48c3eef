"""What a user gives to ``truestep doctor --script``."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from truestep.doctor import Examined


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def fine() -> Examined:
    """Audits of this can work."""
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1)))
    return Examined(model, loss_of, batch_of(0, dist.get_rank()), batch_of)


def augmented() -> Examined:
    """Noise that nobody seeds, in a mapping."""
    good = fine()
    return Examined(
        good.ddp_model,
        lambda model, batch: loss_of(model, batch["pixels"]),
        rebuild_batch=lambda step, rank: {"pixels": batch_of(step, rank) + torch.randn(4, 8), "step": step},
    )


def bare() -> nn.Module:
    """Not what is asked for."""
    return nn.Linear(2, 2)


def fails_on_one() -> Examined:
    """The others would wait for it."""
    if dist.get_rank() == 1:
        raise OSError("no such shard")
    return fine()


def stuck() -> None:
    """Never comes back."""
    time.sleep(1000)
