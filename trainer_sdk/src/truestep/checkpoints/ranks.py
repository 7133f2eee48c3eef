"""What checkpoints and resume need from an attachment, and the two agreements that they make between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from truestep.contract import IdentityRow, Rank, RunRef, TruestepError, canonical_bytes
from truestep.protocols import ResumePoint

T = TypeVar("T")


class RankGroup(Protocol):
    """The collectives that are used here: small JSON, over the CPU. Every rank calls each, in the same order."""

    def gather_rows(self, row: dict[str, Any], /) -> list[dict[str, Any]]:
        """Every rank's row, in rank order."""

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """The data of rank `source`."""


class Attached(Protocol):
    """The part of an attachment that checkpoints and resume use."""

    @property
    def run(self) -> RunRef: ...
    @property
    def identities(self) -> Sequence[IdentityRow]: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def cpu_group(self) -> RankGroup: ...

    resumed: ResumePoint | None


def own_rank(attachment: Attached) -> Rank:
    """This process's rank."""
    return Rank(attachment.rank)


def decide_on_rank_0(attachment: Attached, decide: Callable[[], Any]) -> Any:
    """Run `decide` on rank 0 alone and return its plain JSON on every rank.

    What it raises there is raised on every rank, as the same class where that is one of truestep's errors.
    """
    payload: bytes | None = None
    failure: BaseException | None = None
    if attachment.rank == 0:
        try:
            payload = canonical_bytes({"decided": decide()})
        except Exception as error:
            failure = error
            payload = canonical_bytes({"error": type(error).__name__, "message": str(error)})
    answer = json.loads(attachment.cpu_group.broadcast_bytes(payload, 0))
    if failure is not None:
        raise failure
    if "error" in answer:
        raise _error_class(answer["error"])(f"rank 0: {answer['message']}")
    return answer["decided"]


def attempt_on_every_rank(attachment: Attached, act: Callable[[], T]) -> tuple[T | None, list[str], list[T | Any]]:
    """Run `act`, which returns plain JSON, on every rank.

    Returns (this rank's result, a sentence for each rank that failed, every rank's result). The sentences are the same
    on every rank, so that all can decide alike.
    """
    result: T | None = None
    row: dict[str, Any] = {}
    try:
        result = act()
        row["result"] = result
    except Exception as error:
        row["error"] = f"{error}" if isinstance(error, TruestepError) else f"{type(error).__name__}: {error}"
    rows = attachment.cpu_group.gather_rows(row)
    failures: dict[str, list[int]] = {}
    for rank, entry in enumerate(rows):
        if "error" in entry:
            failures.setdefault(str(entry["error"]), []).append(rank)
    sentences = [f"{_ranks(ranks, len(rows))}: {text}" for text, ranks in failures.items()]
    return result, sentences, [entry.get("result") for entry in rows]


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "every rank"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _error_class(name: str) -> type[TruestepError]:
    pending = [TruestepError]
    while pending:
        candidate = pending.pop()
        if candidate.__name__ == name:
            return candidate
        pending.extend(candidate.__subclasses__())
    return TruestepError
