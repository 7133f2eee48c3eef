"""A replay runs on one rank alone, in another's place: a collective inside it would wait for ranks that run something
else, and this rank's number would give another loss than the one that was recorded."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from truestep.contract import TruestepError

_COLLECTIVES = tuple(
    name
    for name in vars(ProcessGroup)
    if name.lstrip("_").startswith(("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "barrier"))
    or name == "monitored_barrier"
)
_KEY = "truestep.replay"
"""Of what is kept with a thread and goes along into autograd's own threads: on a GPU the backward, and what activation
checkpointing computes again in it, run there."""


class CommunicationInReplayError(TruestepError):
    """The model or the loss uses torch.distributed in a way that one rank alone cannot repeat."""


@dataclass(frozen=True)
class _Isolation:
    rank: int | None


@dataclass
class _Patches:
    """Of this process. Replays overlap: a bundle is traced while the next step runs."""

    users: int = 0
    originals: tuple[tuple[str, Any], ...] = ()
    compiled_rank: bool = False
    """Whether torch.compile has made this rank's number a constant of some code."""


_lock = threading.Lock()
_patches = _Patches()


@contextmanager
def isolated(rank: int | None) -> Iterator[None]:
    """Inside, this thread stands in for the global rank `rank`, and so do the backwards that it starts.

    `dist.get_rank()` and `ProcessGroup.rank()` answer that rank (None: their own). Collectives raise
    `CommunicationInReplayError` before they start. Other threads see nothing of it. Raises the same for a rank in a
    group of some ranks, and where compiled code has this rank's number in it. Not seen: collectives in compiled code,
    and a number that the program keeps in a variable or reads from the environment.
    """
    before = _current()
    _install()
    torch._C._stash_obj_in_tls(_KEY, _Isolation(rank))
    try:
        _refuse_compiled_rank()
        yield
        _refuse_compiled_rank()
    finally:
        torch._C._stash_obj_in_tls(_KEY, before)
        _uninstall()


@contextmanager
def standing_group(rank: int | None, world_size: int | None) -> Iterator[None]:
    """Where this process has no process group: inside there is one of that size, in which it is `rank`, and which must
    not be communicated over. None: nothing."""
    if rank is None or world_size is None or dist.is_initialized():
        yield
        return
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def watch_compiler() -> None:
    """From now on it is noted where torch.compile makes a rank's number a constant. Costs nothing but while it
    compiles."""
    from torch._dynamo.callback import callback_handler

    if _compilation_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_compilation_begins)
        callback_handler.register_end_callback(_compilation_ends)


def _compilation_begins(*_arguments: Any) -> None:
    _install()


def _compilation_ends(*_arguments: Any) -> None:
    _uninstall()


def _current() -> _Isolation | None:
    found: _Isolation | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return found


def _install() -> None:
    with _lock:
        if not _patches.users:
            # Functions of torch.distributed may be imported by name anywhere; all of them end in these methods.
            _patches.originals = tuple((name, vars(ProcessGroup)[name]) for name in ("rank", *_COLLECTIVES))
            for name, original in _patches.originals:
                setattr(ProcessGroup, name, _recorded_rank(original) if name == "rank" else _refusal(name, original))
        _patches.users += 1


def _uninstall() -> None:
    with _lock:
        _patches.users -= 1
        if not _patches.users:
            for name, original in _patches.originals:
                setattr(ProcessGroup, name, original)


def _refusal(name: str, original: Any) -> Callable[..., Any]:
    def refuse(group: ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if _current() is None:
            return original.__get__(group, ProcessGroup)(*arguments, **keywords)
        raise CommunicationInReplayError(
            f"the model or compute_loss communicates ({name.lstrip('_')}) in its forward or backward, which one rank "
            "alone cannot repeat: average losses and metrics outside of compute_loss, use BatchNorm or GroupNorm in "
            "place of SyncBatchNorm, or set Schedule(audit_every=None)"
        )

    return refuse


def _recorded_rank(original: Any) -> Callable[[ProcessGroup], int]:
    def rank(group: ProcessGroup) -> int:
        own: int = original.__get__(group, ProcessGroup)()
        frame = sys._getframe(1)
        if _asked_by_compiler(frame):
            # Another rank's number would stay in code that training runs too.
            _patches.compiled_rank = True
            return own
        isolation = _current()
        if isolation is None or isolation.rank is None:
            return own
        if frame.f_code is dist.get_rank.__code__:
            # It asks the default group, and looks the answer up in the group that its caller gave.
            group = frame.f_locals["group"] or group
        return _rank_of(isolation.rank, group)

    return rank


def _rank_of(rank: int, group: ProcessGroup) -> int:
    """In a group that every rank is in: another one's group may be another, under the same name in its program."""
    if group is not dist.group.WORLD and dist.get_world_size(group) != dist.get_world_size():
        raise CommunicationInReplayError(
            "the model or compute_loss asks for its rank in a group that not every rank is in, so that another rank "
            "cannot run the pass again: decide by it outside of compute_loss, or set Schedule(audit_every=None)"
        )
    return dist.get_group_rank(group, rank)


def _asked_by_compiler(frame: Any) -> bool:
    """Whether dynamo asks, itself or through `get_rank`, in place of the code that it compiles; its logging does
    too."""
    callers = (frame, frame.f_back)
    return any(f is not None and f.f_globals.get("__name__", "").startswith("torch._dynamo.variables") for f in callers)


def _refuse_compiled_rank() -> None:
    if _patches.compiled_rank:
        raise CommunicationInReplayError(
            "the model or compute_loss asks for its rank in code that torch.compile compiles, where it becomes a "
            "constant, so that another rank cannot run the pass again: decide by it outside of the compiled code, or "
            "set Schedule(audit_every=None)"
        )
