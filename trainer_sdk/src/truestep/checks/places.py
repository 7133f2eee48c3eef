"""Where a tensor is and how often PyTorch counted a write to it: a sign of a program's write costs no look at its
data."""

from __future__ import annotations

import torch

Place = tuple[torch.Tensor, int, int]
"""A tensor, its address, its version."""


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version; 0 where it has none, as one that was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def place_of(tensor: torch.Tensor) -> Place:
    """The tensor's place as of now. A tensor of another layout than strided has no address: 0."""
    address = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return tensor, address, version_of(tensor)


def same_place(now: Place, before: Place | None) -> bool:
    """Whether nothing says that a program has written to the tensor or put another one in its place."""
    return before is not None and now[0] is before[0] and now[1:] == before[1:]
