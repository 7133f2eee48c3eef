"""What every test process starts with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A shell's background job ignores SIGINT, and so would every process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# CDK's own validation of a template takes longer than its synthesis; `make check` has it, among stricter ones.
os.environ.setdefault("CDK_VALIDATION", "false")

_LONGEST_FIRST = ("distributed", "e2e", "least_privilege", "workflow", "infra", "browser")
"""Folders of tests in the order in which xdist hands out their groups; all others come behind them."""
_TOGETHER = ("least_privilege", "infra", "browser", "adapters/cluster", "adapters/local_cloud")
"""Folders whose files one worker runs: they share a deployment that takes long to make."""


@pytest.hookimpl(tryfirst=True)  # xdist's own reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together, and in which order: a worker that begins with minutes of work at the very end would
    work alone."""
    items.sort(key=_place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _place(item: pytest.Item) -> int:
    folder = _path(item).parts[0]
    return _LONGEST_FIRST.index(folder) if folder in _LONGEST_FIRST else len(_LONGEST_FIRST)


def _group(item: pytest.Item) -> str:
    # Of those that start ranks only one runs at a time.
    if item.get_closest_marker("distributed"):
        return "distributed"
    path = _path(item)
    return next((folder for folder in _TOGETHER if path.is_relative_to(folder)), path.as_posix())


def _path(item: pytest.Item) -> Path:
    return item.path.relative_to(Path(__file__).parent)
