"""Fingerprints of every module's output, and of its gradient, in the order in which they are computed.

Two traces of one computation that was right and wrong part at the first module that computed another value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from truestep.bundle.contents import TraceEvent
from truestep.fingerprint import pending_sums, settle_sums

MAX_EVENTS = 20_000


class PassTrace:
    """Listens to a module's passes until `close`. Changes no value and holds no activation."""

    def __init__(self, module: nn.Module) -> None:
        """Registers a hook on every submodule, behind those that are there already."""
        self._pending: list[tuple[str, str, torch.Tensor, int]] = []
        self._handles = [
            child.register_forward_hook(self._listener(name or "the model")) for name, child in module.named_modules()
        ]

    def take(self) -> tuple[TraceEvent, ...]:
        """The events since the last call, and forget them. One host synchronisation a device."""
        pending, self._pending = self._pending, []
        settled = settle_sums([sums for _, _, sums, _ in pending], [length for _, _, _, length in pending])
        return tuple(
            TraceEvent(phase=phase, module=name, fingerprint=str(value))
            for (phase, name, _, _), value in zip(pending, settled, strict=True)
        )

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listener(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def computed(_module: nn.Module, _arguments: Any, output: Any) -> None:
            for tensor in _tensors(output):
                self._note("forward", name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._note("backward", name, gradient))  # type: ignore[no-untyped-call]

        return computed

    def _note(self, phase: str, name: str, tensor: torch.Tensor) -> None:
        if len(self._pending) < MAX_EVENTS and tensor.layout is torch.strided:
            length = tensor.numel() * tensor.element_size()
            self._pending.append((phase, name, pending_sums(tensor), length))


def untraceable(module: nn.Module) -> str:
    """Why a trace would change what is computed, or empty."""
    compiled = any(hasattr(child, "_torchdynamo_orig_callable") or _is_compiled(child) for child in module.modules())
    return "the model is compiled: hooks inside it would change the kernels" if compiled else ""


def first_difference(expected: Sequence[TraceEvent], found: Sequence[TraceEvent]) -> TraceEvent | None:
    """The first event of `found` that differs from its counterpart, or None."""
    for want, have in zip(expected, found, strict=False):
        if want != have:
            return have
    return None


def _is_compiled(child: nn.Module) -> bool:
    return type(child).__name__ == "OptimizedModule" or getattr(child, "_compiled_call_impl", None) is not None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)
