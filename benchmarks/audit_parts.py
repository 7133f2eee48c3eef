"""Where an audited step's extra processor time goes: the parts of the product's own code, timed as they run."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from truestep import guard
from truestep.checks import recording, reduction, ring_replay, update_replay
from truestep.collectives import CpuGroup
from truestep.replay import GradientRecorder

REPLAY, FINGERPRINTS = "replay: forward and backward", "fingerprints of the gradients, both passes"
RECORDING, COMPARING = "recording the inputs", "shipping and comparing"
COLLECTIVES = "collectives"
REDUCTION, UPDATE = "reduction check", "update replay"
AUDIT_PARTS = (REPLAY, FINGERPRINTS, RECORDING, COMPARING, COLLECTIVES)
"""What the audit itself is; the other two are checks of their own that run on the same steps."""
PARTS = (*AUDIT_PARTS, REDUCTION, UPDATE)

_CALLS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    (REPLAY, ring_replay, ("replay",)),
    (FINGERPRINTS, GradientRecorder, ("_arrived", "close")),
    (RECORDING, recording.PassRecording, ("__init__", "finish", "inputs", "_keep_buffers")),
    (COMPARING, ring_replay.RingReplayAudit, ("run",)),
    (COLLECTIVES, CpuGroup, ("gather_rows", "exchange", "extremes", "sums", "any_true")),
    (REDUCTION, reduction.ReductionWatch, ("before", "after")),
    (REDUCTION, guard, ("judge_reduction",)),
    (UPDATE, update_replay.UpdateReplay, ("watch", "_before", "_after", "run")),
)


@contextmanager
def parts_timed() -> Iterator[dict[str, float]]:
    """Part -> processor seconds of the calling thread inside it, without the parts that it calls.

    Collectives count for the check that asks for them, except those of the audit. To them belongs what Gloo's own
    threads do meanwhile: three times what the waiting thread itself spends.
    """
    spent: dict[str, float] = defaultdict(float)
    lock, running = threading.Lock(), threading.local()
    originals = [(owner, name, vars(owner)[name]) for _, owner, names in _CALLS for name in names]

    def timed(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            outer: list[list[Any]] = running.__dict__.setdefault("stack", [])
            mine = outer[-1][0] if part == COLLECTIVES and outer and outer[-1][0] in (UPDATE, REDUCTION) else part
            outer.append([mine, 0.0, 0.0])
            start, process = time.thread_time(), time.process_time()
            try:
                return original(*arguments, **keywords)
            finally:
                total, every_thread = time.thread_time() - start, time.process_time() - process
                _, inner, inner_of_every_thread = outer.pop()
                if outer:
                    outer[-1][1] += total
                    outer[-1][2] += every_thread
                with lock:
                    spent[mine] += every_thread - inner_of_every_thread if part == COLLECTIVES else total - inner

        return call

    for part, owner, names in _CALLS:
        for name in names:
            setattr(owner, name, timed(part, vars(owner)[name]))
    try:
        yield spent
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
