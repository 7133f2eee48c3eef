"""An exception in user code on one rank ends the others soon, and tells them which rank it was and where."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.distributed.conftest import exit_codes
from tests.distributed.scenarios import Run, next_token_loss
from truestep import Guard, Schedule, group_lifetime, peers, train
from truestep.loss import LossError
from truestep.peer_failure import PeerFailedError
from truestep.peers import EXIT_PEER_FAILED

pytestmark = pytest.mark.distributed

FAILING, FAILING_STEP = 1, 3
HANGS_SECONDS = 160.0
"""What the groups' own time-outs would take: a rank that is told needs none of it."""


def trained_with_a_failing_loss(run: Run) -> None:
    """The failing rank never reaches its backward: the others wait for it inside DDP's."""
    calls = iter(range(1000))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(calls) == FAILING_STEP and run.rank == FAILING:
            raise ValueError("a label is out of range")
        return next_token_loss(model, batch)

    run.train(6, Schedule(audit_every=None), compute_loss=loss)


def own_loop_with_a_failing_assertion(run: Run) -> None:
    """The failing rank has done its backward: the others wait for it in the guard."""
    guard = Guard(run.ddp, run.optimizer, Schedule(audit_every=None))
    for step, batch in enumerate(run.batches(6)):
        run.optimizer.zero_grad(set_to_none=True)
        guard.start_step(step, batch)
        loss = next_token_loss(run.ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if step == FAILING_STEP and run.rank == FAILING:
            raise AssertionError("my own NaN check")
        guard.before_update(loss)
        run.optimizer.step()
        guard.after_update()


def ending_together(run: Run, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rank 2 ends only when the two others wait in front of the end: late, and nobody is to blame."""
    assert run.attachment is not None
    yield from run.batches(steps)
    peers_of = run.attachment.peers
    while run.rank == 2 and peers_of._store.add(f"{peers_of._loop_keys}-0/ends", 0) < 2:
        time.sleep(0.02)


def trained_on_unequally_many_batches(run: Run) -> None:
    """A run that ends alike on every rank, twice, and another that is resumed and does not."""
    assert run.attachment is not None
    schedule = Schedule(audit_every=None)
    arguments = run.ddp, run.attachment, run.optimizer
    assert train(*arguments, ending_together(run, 3), next_token_loss, None, None, schedule) is None
    assert train(*arguments, run.batches(5, 3), next_token_loss, None, None, schedule, start_step=3) is None
    mine = FAILING_STEP + 5 if run.rank == FAILING else FAILING_STEP + 7
    train(*arguments, run.batches(mine, 5), next_token_loss, None, None, schedule, start_step=5)


def without_a_single_batch(run: Run) -> None:
    """The others are in the warm-up pass of a resumed run, in front of its first step."""
    run.train(5 if run.rank == FAILING else 7, Schedule(audit_every=None), start=5)


def own_loop_with_unequally_many_batches(run: Run) -> None:
    """The ranks that have more are in the guard's collectives, or in a backward."""
    assert run.attachment is not None
    guard = Guard(run.ddp, run.optimizer, Schedule(audit_every=None))
    for step, batch in enumerate(run.batches(2 if run.rank == FAILING else 4)):
        guard.start_step(step, batch)
        loss = next_token_loss(run.ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.before_update(loss)
        guard.after_update()
    run.attachment.end_loop()


def trained_with_a_vector_loss(run: Run) -> None:
    """Every rank's loss is wrong alike; the others notice when the first is about to end over it already."""
    assert run.attachment is not None
    peers_of = run.attachment.peers

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        while run.rank != FAILING and not peers_of._store.add(peers_of._alike_key, 0):
            time.sleep(0.02)
        if run.rank != FAILING:
            time.sleep(1.5 * peers.POLL_SECONDS)  # long enough to hear of an end, if one were told
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")

    run.train(2, Schedule(audit_every=None), compute_loss=loss)


def with_a_batch_that_cannot_be_read(run: Run) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from run.batches(FAILING_STEP)
        if run.rank == FAILING:
            raise ValueError("a sample is damaged")
        yield from run.batches(6, FAILING_STEP)

    assert run.attachment is not None
    train(run.ddp, run.attachment, run.optimizer, batches(), next_token_loss, None, None, Schedule(audit_every=None))


def killed_in_its_step(run: Run) -> None:
    """As by the kernel, for a lack of memory: no word, and the others wait for it in DDP's backward."""
    calls = iter(range(1000))

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(calls) == FAILING_STEP and run.rank == FAILING:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_token_loss(model, batch)

    run.train(6, Schedule(audit_every=None), compute_loss=loss)


LOOPS = {
    "killed": killed_in_its_step,
    "vector": trained_with_a_vector_loss,
    "batch": with_a_batch_that_cannot_be_read,
    "train": trained_with_a_failing_loss,
    "own loop": own_loop_with_a_failing_assertion,
    "unequal": trained_on_unequally_many_batches,
    "none": without_a_single_batch,
    "own loop, unequal": own_loop_with_unequally_many_batches,
}


def rank_of_a_failing_run(rank: int, directory: str, loop: str, failing_rank_stays: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=f"node-{rank}", TRUESTEP_RUN_ID="run", TRUESTEP_OUTBOX_DIR=f"{directory}/outbox")
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/none.json"
    sys.stderr = (Path(directory) / f"stderr-{rank}.txt").open("w", buffering=1)
    if failing_rank_stays and loop == "train":  # Gloo's backward cannot be let go of
        peers.GRACE_SECONDS = 0.5
    timeout = timedelta(seconds=HANGS_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3, timeout=timeout)
    began = time.monotonic()
    try:
        LOOPS[loop](Run(rank))
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # what the interpreter does; multiprocessing does not
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        told = {"kind": type(error).__name__, "text": text, "seconds": time.monotonic() - began}
        (Path(directory) / f"told-{rank}.json").write_text(json.dumps(told))
        if rank == FAILING and failing_rank_stays:
            time.sleep(HANGS_SECONDS)  # ended by the test
        peers._tell_of_exit()  # as above
        os._exit(1)


def run_failing(context: ForkServerContext, directory: Path, loop: str, *, stays: bool = False) -> list[int | None]:
    """Exit codes of the three ranks."""
    children = [
        context.Process(target=rank_of_a_failing_run, args=(rank, str(directory), loop, stays), daemon=True)
        for rank in range(3)
    ]
    for child in children:
        child.start()
    return exit_codes(children, FAILING, stays=stays, within=HANGS_SECONDS / 2)


@pytest.mark.parametrize(
    ("loop", "where", "error"),
    [
        ("train", f"at step {FAILING_STEP}", "ValueError: a label is out of range"),
        ("own loop", f"at step {FAILING_STEP}", "AssertionError: my own NaN"),
        ("batch", f"while fetching the batch of step {FAILING_STEP}", "ValueError: a sample is damaged"),
    ],
)
def test_the_other_ranks_raise_an_error_that_names_the_rank_and_the_step(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path, loop: str, where: str, error: str
) -> None:
    assert run_failing(process_context, tmp_path, loop) == [1, 1, 1]
    for rank in (0, 2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told["kind"] == PeerFailedError.__name__
        assert f"rank {FAILING} on node-{FAILING} stopped {where}: {error}" in told["text"]
        assert told["seconds"] < HANGS_SECONDS / 2
    failing = json.loads((tmp_path / f"told-{FAILING}.json").read_text())
    assert failing["kind"] in error, "the failing rank keeps its own error"


@pytest.mark.parametrize(
    ("loop", "what"),
    [
        ("unequal", f"ran out of batches before step {FAILING_STEP + 5}, which others had begun"),
        ("none", "got no batch at all, and others had begun to train"),
        ("own loop, unequal", "ran out of batches before step 2, which others had begun"),
    ],
)
def test_a_rank_whose_batches_end_first_is_named_on_every_rank_with_what_to_do(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path, loop: str, what: str
) -> None:
    assert run_failing(process_context, tmp_path, loop) == [1, 1, 1]
    for rank in range(3):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        # In a loop of one's own the lost connection arrives in the user's backward: the traceback has a note then.
        assert told["kind"] == PeerFailedError.__name__ or loop.startswith("own loop")
        assert f"rank {FAILING} on node-{FAILING} {what}" in told["text"]
        assert "DistributedSampler(dataset, drop_last=True)" in told["text"]
        assert told["seconds"] < HANGS_SECONDS / 4


def test_a_rank_that_is_killed_ends_the_others_in_seconds_and_one_log_says_who_does_not_answer(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    assert run_failing(process_context, tmp_path, "killed") == [1, -signal.SIGKILL, 1]
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 2)]
    assert max(one["seconds"] for one in told) < HANGS_SECONDS / 4
    heard = [one["text"] for one in told if one["kind"] == PeerFailedError.__name__]
    assert all(f"lost its connection to another rank at step {FAILING_STEP}" in text for text in heard)
    assert not [text for text in heard if " stopped at step" in text], "a healthy rank's loss is no failure of its own"
    logs = "".join((tmp_path / f"stderr-{rank}.txt").read_text() for rank in (0, 2))
    assert f"not heard of since: rank {FAILING} on node-{FAILING}. One that was killed" in logs


def test_an_error_that_every_rank_raises_is_every_ranks_own(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    assert run_failing(process_context, tmp_path, "vector") == [1, 1, 1]
    for rank in range(3):
        assert " stopped " not in (tmp_path / f"stderr-{rank}.txt").read_text()
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told["kind"] == "LossError"
        assert "must return one scalar" in told["text"]
        assert "of shape (48,)" in told["text"]
        assert "return its mean()" in told["text"]
        assert " stopped " not in told["text"]


def test_a_rank_blocked_in_a_backward_is_ended_where_the_failing_process_lives_on(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    codes = run_failing(process_context, tmp_path, "train", stays=True)
    assert (codes[0], codes[2]) == (EXIT_PEER_FAILED, EXIT_PEER_FAILED)
    for rank in (0, 2):
        assert (
            f"rank {FAILING} on node-{FAILING} stopped at step {FAILING_STEP}"
            in (tmp_path / f"stderr-{rank}.txt").read_text()
        )


def test_a_rank_blocked_in_a_check_raises_where_the_failing_process_lives_on(
    process_context: ForkServerContext, distributed_lock: None, tmp_path: Path
) -> None:
    assert run_failing(process_context, tmp_path, "own loop", stays=True) == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told["kind"] == PeerFailedError.__name__
        assert f"rank {FAILING} on node-{FAILING} stopped at step {FAILING_STEP}" in told["text"]
        assert told["seconds"] < peers.GRACE_SECONDS


def test_the_traceback_of_a_lost_connection_says_who_was_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks' watches over one store in one process; the hook is the one that ends a process."""
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: print(*getattr(error, "__notes__", ["-"])))
    monkeypatch.setattr(peers, "_hooks_installed", False)
    monkeypatch.setattr(peers, "ACKNOWLEDGE_SECONDS", 0.2)
    monkeypatch.setattr(peers, "_watches", type(peers._watches)())
    store = dist.FileStore(str(tmp_path / "store"), 2)
    healthy = peers.PeerWatch(store, "attempt", 0, "node-0", 2)  # type: ignore[arg-type]
    monkeypatch.setattr(peers, "_watches", type(peers._watches)([healthy]))
    sys.excepthook(RuntimeError, RuntimeError("first"), None)
    assert healthy.ask() is None, "its own failure is no peer's"

    other = peers.PeerWatch(dist.FileStore(str(tmp_path / "store"), 2), "again", 1, "node-1", 2)  # type: ignore[arg-type]
    listener = peers.PeerWatch(store, "again", 0, "node-0", 2)  # type: ignore[arg-type]
    other.open_step(7)  # type: ignore[arg-type]
    other.tell(KeyError("label"))
    monkeypatch.setattr(peers, "_watches", type(peers._watches)([listener]))
    sys.excepthook(RuntimeError, RuntimeError("Connection closed by peer"), None)
    assert "rank 1 on node-1 stopped at step 7: KeyError: 'label'" in capsys.readouterr().out
    with pytest.raises(PeerFailedError, match="step 7"):
        listener.open_step(8)  # type: ignore[arg-type]
    assert listener.cause_of(RuntimeError("Connection closed by peer")) == listener.ask()
    assert listener.cause_of(KeyError("another label")) is None, "no lost connection, but an error of this rank's own"


def watches_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[peers.PeerWatch]:
    """Two ranks' watches in one process, without threads that hear on their own."""
    monkeypatch.setattr(peers, "ACKNOWLEDGE_SECONDS", 0.1)
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(peers, "_watch", lambda *_: None)
    monkeypatch.setattr(peers, "_hooks_installed", True)
    store = str(directory / "store")
    return [
        peers.PeerWatch(dist.FileStore(store, 2), "attempt", rank, f"node-{rank}", 2)  # type: ignore[arg-type]
        for rank in range(2)
    ]


def test_a_rank_that_ends_alone_over_an_error_of_all_tells_the_others_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = watches_of(tmp_path, monkeypatch)
    for watch in (first, second):
        watch.open_step(4)  # type: ignore[arg-type]
    first.tell(LossError("the loss is a vector"))
    assert second.ask() is None, "every rank is about to raise it"
    first.tell_of_exit()
    assert str(second.ask()) == "rank 0 on node-0 stopped at step 4: truestep.loss.LossError: the loss is a vector"


def test_a_process_that_ends_between_steps_is_told_to_those_only_that_began_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = watches_of(tmp_path, monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for watch in (first, second):
        watch.open_step(4)  # type: ignore[arg-type]
    first.close_step()
    first.tell_of_exit()
    assert second.ask() is None, "the loop may be over, and this rank only slower"
    second.close_step()
    assert second.ask() is None
    with pytest.raises(PeerFailedError, match="rank 0 on node-0 ended its process before step 5, which others"):
        second.open_step(5)  # type: ignore[arg-type]


def test_a_ctrl_c_is_told_as_one_and_a_rank_that_got_it_too_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = watches_of(tmp_path, monkeypatch)
    first.open_step(19)  # type: ignore[arg-type]
    first.tell(KeyboardInterrupt())
    failure = second.ask()
    assert failure is not None
    assert str(failure) == "rank 0 on node-0 was interrupted (Ctrl-C, SIGINT) at step 19"
    second._react(failure)
    assert "was interrupted" in caplog.text, "it alone went on, and has to know why it ends"
    caplog.clear()
    second.tell(KeyboardInterrupt())
    second._react(failure)
    assert caplog.text == ""
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: shown.append(error))
    monkeypatch.setattr(peers, "_hooks_installed", False)
    peers._install_hooks()
    monkeypatch.setattr(peers, "_watches", [second])
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not hasattr(shown[0], "__notes__")


def test_a_second_ctrl_c_while_the_others_are_told_is_no_error_of_the_hook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, _ = watches_of(tmp_path, monkeypatch)
    first.open_step(19)  # type: ignore[arg-type]
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: shown.append(error))
    monkeypatch.setattr(peers, "_hooks_installed", False)
    peers._install_hooks()
    monkeypatch.setattr(peers, "_watches", [first])

    def again(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(first, "_await_count", again)
    monkeypatch.setattr(time, "sleep", again)
    error = KeyboardInterrupt()
    sys.excepthook(KeyboardInterrupt, error, None)
    assert shown == [error]
    first._told = False
    peers._tell_of_exit()
    group_lifetime._let_go()
