"""State of the random number generators that a training step draws from: Python, NumPy where imported, torch."""

from __future__ import annotations

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
    numpy: tuple[Any, ...] | None = None
    """As `numpy.random.get_state` gives it; None where numpy was not imported."""

    def to_document(self) -> dict[str, Any]:
        """Plain containers and tensors, so that `torch.load(..., weights_only=True)` reads it back."""
        # One tensor: as 625 numbers it costs more than all else of a small audit's inputs.
        return {
            "python": [self.python[0], torch.tensor(self.python[1]), self.python[2]],
            "torch_cpu": self.torch_cpu,
            "torch_cuda": self.torch_cuda,
            "numpy": None if self.numpy is None else _numpy_document(*self.numpy),
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
            numpy=None if numpy is None else tuple(numpy),
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
        name, keys, *rest = state.numpy
        # Read from a document, which may have been in a process without numpy.
        raw = keys.numpy().astype("uint32") if isinstance(keys, torch.Tensor) else keys
        sys.modules["numpy"].random.set_state((name, raw, *rest))


def _numpy_state() -> tuple[Any, ...] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _numpy_document(name: str, keys: Any, position: int, has_gauss: int, cached_gaussian: float) -> list[Any]:
    """keys: as int64 tensor [624]."""
    as_tensor = keys if isinstance(keys, torch.Tensor) else torch.from_numpy(keys.astype("int64"))
    return [str(name), as_tensor, int(position), int(has_gauss), float(cached_gaussian)]
