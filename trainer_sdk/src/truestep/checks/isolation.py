"""A replay runs on one rank alone: a collective inside it would wait for ranks that run something else."""

from __future__ import annotations

import threading
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


@contextmanager
def without_communication() -> Iterator[None]:
    """Calls of torch.distributed that this thread makes inside raise `CommunicationInReplayError`, before they start.

    Other threads' go through. Not seen: collectives that a compiler put into a graph.
    """
    # Functions of torch.distributed may be imported by name anywhere; all of them end in these methods.
    originals = {name: vars(ProcessGroup)[name] for name in _COLLECTIVES}
    thread = threading.get_ident()
    for name, original in originals.items():
        setattr(ProcessGroup, name, _refusal(name, original, thread))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)


def _refusal(name: str, original: Any, thread: int) -> Callable[..., Any]:
    def refuse(group: ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if threading.get_ident() != thread:
            return original.__get__(group, ProcessGroup)(*arguments, **keywords)
        raise CommunicationInReplayError(
            f"the model or compute_loss communicates ({name.lstrip('_')}) in its forward or backward, which one rank "
            "alone cannot repeat: average losses and metrics outside of compute_loss, use BatchNorm or GroupNorm in "
            "place of SyncBatchNorm, or set Schedule(audit_every=None)"
        )

    return refuse
