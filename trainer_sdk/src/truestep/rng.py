"""State of the random number generators that a training step draws from: Python, NumPy where imported, torch."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from truestep.fingerprint import fingerprint_nested


@dataclass(frozen=True, kw_only=True)
class RngState:
    """A snapshot of one process. Holds copies; taking one does not touch an accelerator's stream."""

    python: tuple[Any, ...]
    torch_cpu: torch.Tensor
    """uint8 [5056]"""
    torch_cuda: torch.Tensor | None = None
    """uint8, of the current device; None without one."""
    numpy: dict[str, Any] | None = None
    """As `numpy.random.get_state(legacy=False)` gives it, whichever generator there is; None without numpy."""

    def to_document(self) -> dict[str, Any]:
        """Plain containers and tensors, so that `torch.load(..., weights_only=True)` reads it back."""
        # One tensor: as 625 numbers it costs more than all else of a small audit's inputs.
        return {
            "python": [self.python[0], torch.tensor(self.python[1]), self.python[2]],
            "torch_cpu": self.torch_cpu,
            "torch_cuda": self.torch_cuda,
            # The arrays in it as lists of numbers; integers of any size.
            "numpy": None if self.numpy is None else json.dumps(self.numpy, default=lambda array: array.tolist()),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> RngState:
        """Inverse of `to_document`."""
        version, internal, gauss = document["python"]
        numpy = document["numpy"]
        return cls(
            python=(version, tuple(internal.tolist()), gauss),
            torch_cpu=document["torch_cpu"].cpu(),
            torch_cuda=None if document["torch_cuda"] is None else document["torch_cuda"].cpu(),
            numpy=None if numpy is None else json.loads(numpy),
        )

    def fingerprint(self) -> str:
        """32 hex digits over every generator's state."""
        return fingerprint_nested(self.to_document())


def capture() -> RngState:
    """The state of this process's generators now."""
    return RngState(
        python=random.getstate(),
        torch_cpu=torch.get_rng_state(),
        torch_cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        numpy=_numpy_state(),
    )


def restore(state: RngState) -> None:
    """Put the generators back. A generator that the snapshot lacks (NumPy imported since) keeps its state."""
    random.setstate(state.python)
    torch.set_rng_state(state.torch_cpu)
    if state.torch_cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.torch_cuda)
    if state.numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state.numpy)


def _numpy_state() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)
