"""Brings threads to rest before the process ends, and keeps process groups until then.

Up to Python 3.13 a thread that asks for the GIL while Python shuts down is ended by unwinding its stack. Where a C++
destructor is on that stack, C++ aborts the process instead: "terminate called without an active exception", SIGABRT
for an exit code. Three threads of a training are in that place (torch 2.13): a Gloo thread, which lets go of a finished
collective, and with it of Python's tensors and callbacks, a moment after the collective is done; a thread of ours
inside a call of the store; and the one that computes an evidence bundle. So these are awaited while everybody still may
have the GIL. One that does not come out of its call in time is not ended by Python but stopped, as Python 3.14 does.

A model that outlives its group can also hang: where DDP's reducer is the last to hold the group, which it is after
`destroy_process_group`, its destructor waits for Gloo's threads with the GIL held, and they need it. So the reducer is
never the last (torch releases the GIL where Python's own reference is).
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

GLOO_THREAD = "pt_gloo_runloop"
"""What torch calls the threads that run a Gloo group's collectives."""
AT_MOST_SECONDS = 5.0
"""For all threads together: a store that is gone without a word must not keep the process."""

_TASKS = Path("/proc/self/task")
_kept: list[dist.ProcessGroup] = []
_ending: list[tuple[threading.Thread, threading.Event | None]] = []
_registered_at_exit = False


def keep_until_exit(group: dist.ProcessGroup) -> None:
    """Hold a reference to the group, until the process ends or a later call finds the group long destroyed."""
    _register()
    _kept[:] = [kept for kept in _kept if kept is not group and _registered(kept)]
    _kept.append(group)


def end_before_exit(thread: threading.Thread, ended: threading.Event | None = None) -> None:
    """When the process ends, end this thread, which calls into torch, and wait for it.

    ended: is set then, and the thread looks at it. None: `SystemExit` is raised in the thread, between two of its
    calls.
    """
    _register()
    _ending[:] = [(other, told) for other, told in _ending if other.is_alive()]
    _ending.append((thread, ended))


def _register() -> None:
    global _registered_at_exit
    if not _registered_at_exit:
        _registered_at_exit = True
        atexit.register(_let_go)


def _registered(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def _let_go() -> None:
    # A second Ctrl-C would otherwise be shown as an error of this module.
    with suppress(KeyboardInterrupt):
        deadline = time.monotonic() + AT_MOST_SECONDS
        for thread, ended in _ending:
            if ended is not None:
                ended.set()
            elif thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        for thread, _ in _ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        _await_rest(deadline)
    if sys.version_info < (3, 14) and any(thread.is_alive() for thread, _ in _ending):
        _stop_instead_of_aborting()
    _kept.clear()


def _stop_instead_of_aborting() -> None:
    """From here on let C++ halt the thread that it would abort the process over; the others end it, with their code."""
    with suppress(OSError, AttributeError):  # another C++ library than GNU's: nothing is known of it
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


def _await_rest(deadline: float) -> None:
    """Wait until every Gloo thread has slept from one look to the next.

    Who waits for the GIL cannot pass for asleep: it looks for it every 5 ms, and is woken when this thread gives it up.
    One that sits in a collective which its peers will never enter can: nothing would end that wait.
    """
    before = _gloo_threads()
    while time.monotonic() < deadline:
        time.sleep(0.01)
        now = _gloo_threads()
        if all(state == before.get(name) and "S" in state[0] for name, state in now.items()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """Thread -> (state, how often it gave up the processor, how often it lost it). Empty where there is no /proc."""
    states: dict[str, tuple[str, ...]] = {}
    for task in _TASKS.glob("*"):
        with suppress(OSError):  # ended since
            fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if fields["Name"] == GLOO_THREAD:
                switches = (fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"])
                states[task.name] = (fields["State"], *switches)
    return states
