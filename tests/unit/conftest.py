"""What several folders of unit tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

WorldOfOne = Callable[[Path], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def world_of_one() -> WorldOfOne:
    """Opens a Gloo group of one process, whose store is in the given folder, for a block.

    The group is kept until the next one: pytest holds a test's model longer than its fixtures, and a reducer that
    outlives its group joins Gloo's threads with the GIL held, while one that has just finished an all-reduce waits for
    the GIL to let go of it (torch 2.13). The group's own Python object releases the GIL first.
    """
    import torch.distributed as dist

    latest: list[dist.ProcessGroup] = []

    @contextmanager
    def opened(folder: Path) -> Iterator[None]:
        dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        latest[:] = [dist.group.WORLD]
        yield
        dist.destroy_process_group()

    return opened
