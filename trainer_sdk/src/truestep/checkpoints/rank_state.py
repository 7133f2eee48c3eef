"""What belongs to one rank alone: its random number generators, and buffers in which healthy ranks differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from truestep import rng


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside DDP and ``torch.compile`` wrappers, in any order."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def buffer_digests(model: nn.Module) -> dict[str, str]:
    """Name -> SHA-256 of every persistent buffer's bytes. Copies accelerator buffers to the host."""
    return {name: _digest(buffer) for name, buffer in _persistent_buffers(model).items()}


def rank_state(model: nn.Module, common_digests: Mapping[str, str]) -> dict[str, Any]:
    """The generators, and the buffers that differ from rank 0's `common_digests` (BatchNorm's statistics, for one).

    Holds nothing but what ``torch.load(weights_only=True)`` reads back.
    """
    buffers = {
        name: buffer.detach().cpu().clone()
        for name, buffer in _persistent_buffers(model).items()
        if _digest(buffer) != common_digests.get(name)
    }
    return {"rng": rng.capture().to_document(), "buffers": buffers}


def restore_rank_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put back what `rank_state` returned; call it last, so that nothing draws from the generators afterwards."""
    buffers = _persistent_buffers(model)
    with torch.no_grad():
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)
    rng.restore(rng.RngState.from_document(state["rng"]))


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    module = unwrapped(model)
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()
