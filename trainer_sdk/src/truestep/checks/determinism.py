"""Deterministic kernels for the length of an audit step, and word of kernels that have no such version."""

from __future__ import annotations

import threading
import warnings
import weakref
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
    """What the user had."""

    enabled: bool
    warn_only: bool
    fill: bool
    benchmark: bool
    filters: warnings.catch_warnings[None]

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self.enabled, warn_only=self.warn_only)
        _memory.fill_uninitialized_memory = self.fill
        torch.backends.cudnn.benchmark = self.benchmark
        self.filters.__exit__(None, None, None)


@dataclass
class _Switched:
    """Of this process."""

    on: weakref.WeakSet[DeterministicKernels]
    """A guard that is given up in the middle of a step counts no longer."""
    before: _Modes | None = None


_lock = threading.Lock()


def _set_deterministic() -> _Modes:
    before = _Modes(
        enabled=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill=_memory.fill_uninitialized_memory,
        benchmark=torch.backends.cudnn.benchmark,
        filters=warnings.catch_warnings(),
    )
    before.filters.__enter__()
    warnings.filterwarnings("ignore", message=_MESSAGE)
    strict = before.enabled and not before.warn_only
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Filling every empty tensor costs 500 times the allocation and protects nothing here: both passes read what they
    # wrote.
    _memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    return before


class DeterministicKernels:
    """Switches deterministic kernels on, and back to whatever the user had. Never makes a kernel raise.

    The modes are the process's: where several are on at once, as the guards of a GAN's two models, the last one that is
    switched back restores them.
    """

    def switch_on(self) -> None:
        """A kernel without a deterministic version warns, once it runs; the warning is kept from the user's filters."""
        with _lock:
            if _switched.before is None:
                _switched.before = _set_deterministic()
            _switched.on.add(self)

    def switch_back(self) -> None:
        """Restore the user's modes. Does nothing where they are already restored, or another one is still on."""
        with _lock:
            _switched.on.discard(self)
            if not _switched.on and _switched.before is not None:
                before, _switched.before = _switched.before, None
                before.restore()


_switched = _Switched(weakref.WeakSet())


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
