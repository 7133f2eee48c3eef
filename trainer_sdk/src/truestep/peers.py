"""Word of a rank that stopped: an exception in user code on one rank must not leave the others in a collective.

The rank that fails writes who it is, its step and its error to the process group's store. Every other rank looks there
once a second from a thread of its own, and gives up waiting: collectives of the SDK are interrupted and raise
`PeerFailedError`, the data-parallel group is aborted (NCCL lets go of a blocked backward then), and a process that is
still inside its step `GRACE_SECONDS` later is ended, because Gloo's groups cannot be aborted.

A rank that is killed says nothing, but its connections close: whoever waits for one of them fails, and tells the rest,
as above. That rank is not the one to look at, so its log has the ranks that have not answered it since.

A rank whose batches end notes it there too, and so does one whose process ends between two steps. A rank in a step that
another will never enter says so to all of them, and the one that has ended raises as well: its connections close, which
lets go of a backward that waits for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from truestep.contract import NodeName, Rank, Step, TruestepError
from truestep.group_lifetime import end_before_exit
from truestep.peer_failure import PeerFailedError, PeerFailure, lost_connection

_log = logging.getLogger(__name__)
_Batch = TypeVar("_Batch")

POLL_SECONDS = 1.0
POLLS_PER_SECOND = 500
"""Of all ranks together: the store is one server, so that 2,000 ranks look every four seconds."""
ACKNOWLEDGE_SECONDS = 5.0
"""How long the failing rank stays until the others have read it: the store may live in its own process."""
GRACE_SECONDS = 60.0
END_SECONDS = 60.0
"""How long a rank whose batches have ended waits for the others to end theirs, before it goes on all the same."""
EXIT_PEER_FAILED = 77
"""Exit code of a process that was ended inside its step after another rank had failed."""


class PeerWatch:
    """Tells and hears of failures in one attempt. One a process and attachment; the thread ends with its owner."""

    def __init__(self, store: Store, attempt_id: str, rank: Rank, node_name: NodeName, world_size: int) -> None:
        """store: the data-parallel group's. No collective."""
        self._store = store
        self._key = f"truestep/{attempt_id}/failed"
        self._node_keys = f"truestep/{attempt_id}/node"
        self._loop_keys = f"truestep/{attempt_id}/loop"
        self._loop = 0
        """Loops that ended on this rank: what another rank says of the end of one holds for that one alone."""
        self._end: tuple[int, PeerFailure] | None = None
        """The first rank whose batches ended in that loop, where it is known."""
        self._rank, self._node_name, self._world_size = rank, node_name, world_size
        self._at_failure: list[Callable[[], None]] = []
        self._heard: PeerFailure | None = None
        self._told = self._interrupted = self._fetches = False
        self._alike = ""
        """This rank's error of a kind that every rank raises, shortened."""
        self._open_step: Step | None = None
        self._step = self._next_step = Step(0)
        self._ended = threading.Event()
        if world_size > 1:
            store.set(f"{self._node_keys}/{rank}", node_name)
            _watches.add(self)
            _install_hooks()
            weakref.finalize(self, self._ended.set).atexit = False
            about = weakref.ref(self), self._ended, _period(world_size)
            watcher = threading.Thread(target=_watch, name="truestep-peers", args=about, daemon=True)
            watcher.start()
            end_before_exit(watcher, self._ended)

    def at_failure(self, let_go: Callable[[], None]) -> None:
        """Have this called, on a thread of its own, when a failure is heard of: it gives up a group's collectives."""
        self._at_failure.append(let_go)

    def open_step(self, step: Step) -> None:
        """The forward of `step` is about to start. Raises `PeerFailedError` where a failure is known already."""
        self._step = self._open_step = step
        self._alike = ""
        self._next_step = Step(step + 1)
        if self._end is not None:
            self.raise_if_failed()
        self.raise_if_heard()

    def await_step(self, step: Step) -> None:
        """What fails from here on fails at `step`, whose forward has not started: nobody waits for this rank in it."""
        self._step = step

    def fetching(self, batches: Iterable[_Batch], start_step: Step) -> Iterator[_Batch]:
        """The same batches; what raises in between is told as the fetching of that step's batch."""
        source, step = iter(batches), start_step
        while True:
            before, self._step, self._fetches = self._step, step, True
            try:
                batch = next(source)
            except StopIteration:
                self._step, self._fetches = before, False
                return
            self._fetches = False
            yield batch
            step = Step(step + 1)

    def close_step(self) -> None:
        """This rank has come through the checks before the update: the others no longer wait for it in a backward."""
        self._open_step = None

    def end_loop(self) -> None:
        """This rank's batches have ended. Returns when every rank's have, at the latest `END_SECONDS` later.

        Raises `PeerFailedError` on every rank where one has begun a step that another will not enter.
        """
        if self._world_size == 1:
            return
        self._open_step, loop, step = None, self._loop, self._next_step
        self._loop, self._next_step = loop + 1, Step(0)
        keys = f"{self._loop_keys}-{loop}"
        try:
            self._note_end(f"{keys}/end", step)
            if self._store.add(f"{keys}/ends", 1) == self._world_size:
                self._store.set(f"{keys}/over", "1")
            else:
                self._await_ends(f"{keys}/over")
        except (RuntimeError, ValueError) as gone:
            _log.debug("the other ranks' ends cannot be known: %s", gone)
        if self._heard is not None and self._heard.ended:
            self._await_listeners(self._world_size)
        self.raise_if_heard()

    def _note_end(self, key: str, step: Step, error: str = "") -> None:
        end = PeerFailure(rank=self._rank, node_name=self._node_name, step=step, error=error, ended=True)
        self._store.compare_set(key, "", json.dumps(asdict(end)))

    def _await_ends(self, over: str) -> None:
        deadline = time.monotonic() + END_SECONDS
        while self.ask() is None and time.monotonic() < deadline:
            try:
                self._store.wait([over], timedelta(seconds=_period(self._world_size)))
            except RuntimeError:
                if not self._store.check([over]):
                    continue
            return

    @property
    def in_step(self) -> bool:
        """Whether this rank is between `open_step` and `close_step`, where the others wait for it."""
        return self._open_step is not None

    def raise_if_heard(self) -> None:
        """Raise `PeerFailedError` where the thread has heard of a failure. Costs nothing."""
        if self._heard is not None:
            raise PeerFailedError(self._heard)

    def raise_if_failed(self) -> None:
        """Raise `PeerFailedError` where another rank has failed, as the store says now."""
        if self.ask() is not None:
            self.raise_if_heard()

    def ask(self) -> PeerFailure | None:
        """Another rank's failure, looked up in the store now. None too where the store is gone."""
        if self._heard is None and self._world_size > 1:
            try:
                self._compare_ends()
                if self._store.check([self._key]):
                    failure = PeerFailure(**json.loads(self._store.get(self._key)))
                    if failure.rank != self._rank or failure.ended:
                        self._heard = failure
                        self._store.set(f"{self._key}/heard/{self._rank}", "1")
                        self._store.add(f"{self._key}/heard", 1)
            except (RuntimeError, ValueError):
                # The store is gone, and with it everything that could still be said.
                self._ended.set()
        return self._heard

    def _compare_ends(self) -> None:
        """Tell all ranks where this one is in a step that another, whose batches have ended, will never enter."""
        loop, step = self._loop, self._open_step
        if (self._end is None or self._end[0] != loop) and self._store.check([f"{self._loop_keys}-{loop}/end"]):
            self._end = loop, PeerFailure(**json.loads(self._store.get(f"{self._loop_keys}-{loop}/end")))
        if self._end is not None and self._end[0] == loop and step is not None and step >= self._end[1].step:
            self._store.compare_set(self._key, "", json.dumps(asdict(self._end[1])))

    def tell(self, error: BaseException) -> None:
        """This rank cannot go on. Only the first rank's word counts; waits until the others have heard it, at most
        `ACKNOWLEDGE_SECONDS`. Never raises, and does nothing for errors that every rank raises alike."""
        if self._world_size == 1 or isinstance(error, PeerFailedError):
            return
        # A Ctrl-C while this waits: who presses it twice wants the end, not an error inside an error.
        with suppress(KeyboardInterrupt):
            if isinstance(error, TruestepError):
                self._count_alike(error)
                return
            self._interrupted = self._interrupted or isinstance(error, KeyboardInterrupt)
            self._say(_shortened(error))

    def tell_of_exit(self) -> None:
        """The process ends. Inside its step, or over an error, the others hear of it unless all end alike.

        Between two steps those hear of it that have begun the next one. Without a wait: mostly the loop is over.
        """
        if self.in_step or self._alike:
            if not self._all_alike():
                self._say(self._alike or "SystemExit: the process ended inside its step")
        elif self._next_step and not (self._told or self._heard or self._ended.is_set()) and dist.is_initialized():
            with suppress(RuntimeError, ValueError):
                self._note_end(f"{self._loop_keys}-{self._loop}/end", self._next_step, "SystemExit: the process ended")

    def _count_alike(self, error: TruestepError) -> None:
        if not self._alike:
            self._alike = _shortened(error)
            with suppress(RuntimeError, ValueError):
                self._store.add(self._alike_key, 1)

    @property
    def _alike_key(self) -> str:
        return f"{self._loop_keys}-{self._loop}/alike/{self._step}"

    def _all_alike(self) -> bool:
        """Whether every rank raised an error of that kind, soon enough. No wait for a rank that raised none."""
        if not self._alike:
            return False
        try:
            return self._await_count(self._alike_key, self._world_size)
        except (RuntimeError, ValueError):
            return True  # the store is gone, and with it everything that could still be said

    def _say(self, error: str) -> None:
        if self._told or self.ask() is not None:
            return
        self._told = True
        failure = PeerFailure(
            rank=self._rank, node_name=self._node_name, step=self._step, error=error, fetching=self._fetches
        )
        try:
            said = self._store.compare_set(self._key, "", json.dumps(asdict(failure)))
            if json.loads(said)["rank"] != self._rank:
                return
            if not self._await_listeners(self._world_size - 1) and lost_connection(failure.error):
                self._say_who_is_silent()
        except (RuntimeError, ValueError) as unreachable:
            _log.warning("the other ranks could not be told of this failure (they will time out): %s", unreachable)

    def cause_of(self, error: BaseException) -> PeerFailure | None:
        """Another rank's failure that `error` follows from, as a lost connection does; None for this rank's own."""
        failure = self.ask()
        follows = isinstance(error, RuntimeError) and failure is not None and failure.error != _shortened(error)
        return failure if follows else None

    def _await_listeners(self, number: int) -> bool:
        """Whether so many ranks have heard it in time."""
        return self._await_count(f"{self._key}/heard", number)

    def _await_count(self, key: str, number: int) -> bool:
        deadline = time.monotonic() + ACKNOWLEDGE_SECONDS + _period(self._world_size)
        while (count := self._store.add(key, 0)) < number and time.monotonic() < deadline:
            time.sleep(0.05)
        return count >= number

    def _say_who_is_silent(self) -> None:
        """Not who is to blame: a rank that is only slow to answer may be among them."""
        silent = [
            f"rank {rank} on {self._store.get(f'{self._node_keys}/{rank}').decode()}"
            for rank in range(self._world_size)
            if rank != self._rank and not self._store.check([f"{self._key}/heard/{rank}"])
        ]
        more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
        _log.error(
            "a connection to another rank was lost at step %d; not heard of since: %s%s. One that was killed leaves no "
            "word of its own: its pod's status says by what (exit code 137 is most often a lack of memory)",
            self._step,
            ", ".join(silent[:8]),
            more,
        )

    def _react(self, failure: PeerFailure) -> None:
        """On the watching thread: say it, release what can be released, and do not let this process hang."""
        if not self._interrupted:
            _log.error("%s; this rank gives up waiting for it", failure)
        for let_go in self._at_failure:
            try:
                let_go()
            except RuntimeError as error:
                _log.debug("a group could not be let go of: %s", error)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.in_step and not self._ended.wait(0.1):
            if time.monotonic() > deadline:
                sys.stderr.write(f"truestep: {failure}; this process was still waiting for it and is ended\n")
                sys.stderr.flush()
                os._exit(EXIT_PEER_FAILED)


_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()
_hooks_installed = False


def _shortened(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:500]


def _period(world_size: int) -> float:
    return max(POLL_SECONDS, world_size / POLLS_PER_SECOND)


def _watch(reference: weakref.ref[PeerWatch], ended: threading.Event, period: float) -> None:
    while not ended.wait(period):
        watch = reference()
        # After destroy_process_group rank 0, whose process may hold the store, is free to leave.
        if watch is None or not dist.is_initialized():
            return
        failure = watch.ask()
        if failure is not None:
            watch._react(failure)
            return
        del watch


def _install_hooks() -> None:
    """Exceptions that end the process reach the other ranks; where another rank failed first, the traceback says so."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(KeyboardInterrupt):
            for watch in list(_watches):
                watch.tell(error)
                failure = watch.ask()
                if failure is not None and not isinstance(error, (TruestepError, KeyboardInterrupt)):
                    error.add_note(f"truestep: {failure}")
        before(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_tell_of_exit)


def _tell_of_exit() -> None:
    with suppress(KeyboardInterrupt):
        for watch in list(_watches):
            watch.tell_of_exit()
