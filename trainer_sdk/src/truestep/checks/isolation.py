"""A replay runs on one rank alone: a collective inside it would wait for ranks that run something else."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup

from truestep.contract import TruestepError

_COLLECTIVES = tuple(
    name
    for name in vars(ProcessGroup)
    if name.lstrip("_").startswith(("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "barrier"))
    or name == "monitored_barrier"
)


class CommunicationInReplayError(TruestepError):
    """The model or the loss calls torch.distributed in its forward or backward."""


_lock = threading.Lock()
_isolated: Counter[int] = Counter()
"""Thread -> how many isolations it is inside of. Replays overlap: a bundle is traced while the next step runs."""
_originals: dict[str, Any] = {}


@contextmanager
def without_communication() -> Iterator[None]:
    """Calls of torch.distributed that this thread makes inside raise `CommunicationInReplayError`, before they start.

    Other threads' go through. Not seen: collectives that a compiler put into a graph.
    """
    thread = threading.get_ident()
    with _lock:
        if not _isolated:
            # Functions of torch.distributed may be imported by name anywhere; all of them end in these methods.
            _originals.update({name: vars(ProcessGroup)[name] for name in _COLLECTIVES})
            for name, original in _originals.items():
                setattr(ProcessGroup, name, _refusal(name, original))
        _isolated[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _isolated[thread] -= 1
            if not _isolated[thread]:
                del _isolated[thread]
            if not _isolated:
                for name, original in _originals.items():
                    setattr(ProcessGroup, name, original)


def _refusal(name: str, original: Any) -> Callable[..., Any]:
    def refuse(group: ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if threading.get_ident() not in _isolated:
            return original.__get__(group, ProcessGroup)(*arguments, **keywords)
        raise CommunicationInReplayError(
            f"the model or compute_loss communicates ({name.lstrip('_')}) in its forward or backward, which one rank "
            "alone cannot repeat: average losses and metrics outside of compute_loss, use BatchNorm or GroupNorm in "
            "place of SyncBatchNorm, or set Schedule(audit_every=None)"
        )

    return refuse
