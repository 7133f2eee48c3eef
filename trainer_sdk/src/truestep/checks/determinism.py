"""Deterministic kernels for the length of an audit step, and word of kernels that have no such version."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Its class is put in place of the module at import, which type checkers cannot see.
_memory: Any = torch.utils.deterministic

_MESSAGE = ".*(does not have a deterministic|deterministic behavior|not deterministic).*"
_MARKERS = ("does not have a deterministic", "deterministic behavior", "not deterministic")


@dataclass(frozen=True)
class _Modes:
    enabled: bool
    warn_only: bool
    fill: bool
    benchmark: bool


class DeterministicKernels:
    """Switches deterministic kernels on, and back to whatever the user had. Never makes a kernel raise."""

    def __init__(self) -> None:
        self._before: _Modes | None = None
        self._filters: warnings.catch_warnings[None] | None = None

    def switch_on(self) -> None:
        """A kernel without a deterministic version warns, once it runs; the warning is kept from the user's filters."""
        if self._before is not None:
            return
        self._before = _Modes(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            _memory.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
        )
        self._filters = warnings.catch_warnings()
        self._filters.__enter__()
        warnings.filterwarnings("ignore", message=_MESSAGE)
        strict = self._before.enabled and not self._before.warn_only
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        # Filling every empty tensor costs 500 times the allocation and protects nothing here: both passes read what
        # they wrote.
        _memory.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False

    def switch_back(self) -> None:
        """Restore the user's modes. Does nothing where they are already restored."""
        if self._before is None:
            return
        torch.use_deterministic_algorithms(self._before.enabled, warn_only=self._before.warn_only)
        _memory.fill_uninitialized_memory = self._before.fill
        torch.backends.cudnn.benchmark = self._before.benchmark
        self._before = None
        if self._filters is not None:
            self._filters.__exit__(None, None, None)
            self._filters = None


@contextmanager
def collect_nondeterministic() -> Iterator[list[str]]:
    """First lines of the warnings about kernels without a deterministic version that run inside."""
    found: list[str] = []
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found += [text for text in (str(w.message) for w in caught) if any(marker in text for marker in _MARKERS)]
    finally:
        torch.set_warn_always(always)
