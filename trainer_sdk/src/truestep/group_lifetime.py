"""Keeps process groups until the process ends, because a model that outlives its group can hang or abort there.

A Gloo thread lets go of a finished collective a moment after the collective is done, and needs the GIL for it (torch
2.13). Two things go wrong in that moment. Where DDP's reducer is the last to hold the group, which it is after
`destroy_process_group`, its destructor waits for that thread with the GIL held: for ever. Where Python is shutting down
already, the thread is ended as it asks for the GIL, and C++ aborts the process ("terminate called without an active
exception"). So the reducer is never the last (torch releases the GIL where Python's own reference is), and the threads
get the GIL once more while everybody still may have it.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress

import torch.distributed as dist

SETTLE_SECONDS = 0.2
"""At the end of the process. A thread that has the processor needs microseconds, and on a busy machine waits for it;
nothing can be awaited instead."""

_kept: list[dist.ProcessGroup] = []


def keep_until_exit(group: dist.ProcessGroup) -> None:
    """Hold a reference to the group, until the process ends or a later call finds the group long destroyed."""
    if not _kept:
        atexit.register(_let_go)
    _kept[:] = [kept for kept in _kept if kept is not group and _registered(kept)]
    _kept.append(group)


def _registered(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def _let_go() -> None:
    # A second Ctrl-C would otherwise be shown as an error of this module.
    with suppress(KeyboardInterrupt):
        time.sleep(SETTLE_SECONDS)
    _kept.clear()
