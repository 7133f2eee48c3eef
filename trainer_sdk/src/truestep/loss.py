"""What `compute_loss` may return."""

from __future__ import annotations

from typing import Any

import torch

from truestep.contract import TruestepError


class LossError(TruestepError):
    """The loss is not one number; says what to return. Every rank gets the same kind of loss, so every rank raises."""


def require_scalar(loss: Any) -> torch.Tensor:
    """The loss, where it is a tensor with one floating-point element. Raises `LossError` otherwise."""
    if not isinstance(loss, torch.Tensor):
        kind = type(loss).__name__
        hint = "return its loss alone and keep the rest where you log" if isinstance(loss, (tuple, list, dict)) else ""
        raise LossError(
            f"compute_loss must return one scalar tensor, and returned {kind}: {hint or 'return the loss as a tensor'}"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise LossError(
            f"compute_loss must return one scalar in floating point, and returned a {loss.dtype} tensor of shape "
            f"{tuple(loss.shape)}: return its mean(), or its sum() where that is what you train"
        )
    return loss
