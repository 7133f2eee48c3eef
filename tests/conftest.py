"""What every test process starts with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A shell's background job ignores SIGINT, and so would every process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST_FIRST = ("e2e", "least_privilege", "workflow", "distributed", "browser")
"""Folders of tests in the order in which xdist hands out their files; all others come behind them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker that begins with a file of minutes at the very end would work alone."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return _LONGEST_FIRST.index(folder) if folder in _LONGEST_FIRST else len(_LONGEST_FIRST)

    items.sort(key=place)
