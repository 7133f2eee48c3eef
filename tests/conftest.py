"""What every test process starts with."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# A shell's background job ignores SIGINT, and so would every process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# CDK's own validation of a template takes longer than its synthesis; `make check` has it, among stricter ones.
os.environ.setdefault("CDK_VALIDATION", "false")

# botocore's models are hundreds of thousands of objects that stay. To look through them all whenever another client is
# made took 40 % of the time of the tests that run in these processes.
gc.set_threshold(100_000, 20, 50)

# A deadline measures how busy the machine is.
hypothesis.settings.register_profile("truestep", deadline=None)
hypothesis.settings.load_profile("truestep")

_LONGEST_FIRST = ("distributed", "e2e", "least_privilege", "workflow", "infra", "browser")
"""Folders of tests in the order in which xdist hands out their groups; all others come behind them."""
_TOGETHER = {
    "distributed": ("distributed", "unit/custody/test_several_ranks.py", "unit/custody/test_killed_saves.py"),
    **{name: (name,) for name in ("least_privilege", "infra", "browser", "adapters/cluster", "adapters/local_cloud")},
}
"""What one worker runs: of those that start ranks only one runs at a time; the others share a deployment that takes
long to make."""


class _Groups(LoadFileScheduling):
    """A file to a worker, and all of a group's."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(str(super()._split_scope(nodeid))).relative_to("tests")
        return next((name for name, parts in _TOGETHER.items() if _within(path, parts)), path.as_posix())


@pytest.hookimpl(optionalhook=True)  # also with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Groups | None:
    """xdist's own groups (`xdist_group`) do nothing under pytest 9.2."""
    return _Groups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker that begins with minutes of work at the very end would work alone."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(Path(__file__).parent)
    if _within(path, _TOGETHER["distributed"]):
        return 0
    return _LONGEST_FIRST.index(path.parts[0]) if path.parts[0] in _LONGEST_FIRST else len(_LONGEST_FIRST)


def _within(path: Path, parts: Iterable[str]) -> bool:
    return any(path.is_relative_to(part) for part in parts)
