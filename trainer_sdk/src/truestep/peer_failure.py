"""Which rank failed, or ran out of batches, and where: what the other ranks are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from truestep.contract import NodeName, Rank, Step, TruestepError


@dataclass(frozen=True, kw_only=True)
class PeerFailure:
    """The first rank that failed."""

    rank: Rank
    node_name: NodeName
    step: Step
    error: str = ""
    """Class and message, shortened."""
    ended: bool = False
    """It did not fail: its batches, or its process where `error` says so, ended in front of `step`, which other ranks
    had begun."""
    fetching: bool = False
    """It failed before its step began: what gives the batch of `step` raised."""

    def __str__(self) -> str:
        if self.ended:
            return f"rank {self.rank} on {self.node_name} {_end_text(self.step, exited=bool(self.error))}"
        if lost_connection(self.error):
            return (
                f"rank {self.rank} on {self.node_name} lost its connection to another rank at step {self.step}; which "
                f"ranks have not answered it since, its log says: {self.error}"
            )
        where = f"while fetching the batch of step {self.step}" if self.fetching else f"at step {self.step}"
        if self.error.startswith(KeyboardInterrupt.__name__):
            return f"rank {self.rank} on {self.node_name} was interrupted (Ctrl-C, SIGINT) {where}"
        return f"rank {self.rank} on {self.node_name} stopped {where}: {self.error}"


def lost_connection(error: str) -> bool:
    """Whether the error, class and message, is of a process group whose other end is gone: Gloo's words."""
    return error.startswith("RuntimeError") and any(
        words in error for words in ("onnection closed by peer", "onnection reset by peer", "Broken pipe")
    )


def _end_text(step: Step, *, exited: bool) -> str:
    if exited:
        return (
            f"ended its process before step {step}, which others had begun: its log or its exit code says why; where "
            "its batches had run out, call end_loop() after the loop, and every rank hears what to change"
        )
    had = (
        f"ran out of batches before step {step}, which others had begun"
        if step
        else "got no batch at all, and others had begun to train"
    )
    return (
        f"{had}: give every rank equally many batches, with DistributedSampler(dataset, drop_last=True) and "
        "DataLoader(..., drop_last=True), or by ending each rank's iterable after as many as the shortest one has"
    )


class PeerFailedError(TruestepError):
    """Another rank failed, so this one cannot go on; the message names it. The traceback is in that rank's log.

    Raised on every rank, also on the named one, where a rank's batches ended before the others'.
    """

    def __init__(self, failure: PeerFailure) -> None:
        advice = "" if failure.ended else "; this rank cannot go on without it, see that rank's log"
        super().__init__(f"{failure}{advice}")
        self.failure = failure
