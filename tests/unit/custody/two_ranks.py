"""What each of two ranks does in test_several_ranks, and what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_run import WAYS, OneRun
from truestep.checkpoints import background, list_checkpoints, verified
from truestep.checkpoints.storage import FileStorage
from truestep.contract import TOMBSTONE_NAME, ResumeDirective, Step, Tombstone, TruestepError, canonical_bytes
from truestep.resumption import resume


class OneRank(OneRun):
    """One rank of one start of the run, whose running statistics follow its own batch."""

    def __init__(self, root_uri: str, outbox: str, seed: int, **arguments: Any) -> None:
        super().__init__(root_uri, seed, Path(outbox), **arguments)
        # Forward only: weights stay equal.
        self.model(torch.randn(16, 8) * (1 + self.attachment.rank))

    def drawn(self) -> list[float]:
        return [float(torch.rand(())), float(dict(self.model.named_buffers())["1.running_var"].sum())]


def save_then_resume(_: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """The next random number and the running statistics before and after the resume, on this rank."""
    first = OneRank(root_uri, outbox, seed=1)
    ref = first.save(4)
    first.checkpoints.promote(Step(4))
    expected = first.drawn()
    again = OneRank(root_uri, outbox, seed=77)
    point = resume(again.attachment, again.checkpoints)
    return {"expected": expected, "found": again.drawn(), "same": point.checkpoint == ref, "start": point.start_step}


def fail_on_rank_1(_: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """Rank 1 cannot write its own file: a directory is in the way."""
    run = OneRank(root_uri, outbox, seed=1)
    if run.attachment.rank == 1:
        original = run.checkpoints.storage.write_stream

        def in_the_way(path: str, write: Any, **options: Any) -> Any:
            Path(root_uri.removeprefix("file://"), path, "in the way").mkdir(parents=True)
            return original(path, write, **options)

        run.checkpoints.storage.write_stream = in_the_way  # type: ignore[method-assign]
    return _raised(lambda: run.save(4))


def no_memory_for_a_copy(_: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """Saves in the background that begin nowhere (step 1) and on rank 0 only (3); the run goes on: nothing may hang."""
    run = OneRank(root_uri, outbox, seed=1, distributed=True, asynchronous=True)
    copy = background.save_in_background

    def fail(*_: Any) -> Any:
        raise MemoryError("no room for a copy")

    results = {}
    for step in range(1, 5):
        fails = step == 1 or (step == 3 and run.attachment.rank == 1)
        background.save_in_background = fail if fails else copy
        results[str(step)] = _raised(lambda step=step: run.save(step))  # type: ignore[misc]
    run.checkpoints.finish()
    return results


def corrupt_on_rank_1(_: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """Only rank 1's own file of the newer checkpoint is damaged: both must fall back."""
    run = OneRank(root_uri, outbox, seed=1)
    older = run.save(4)
    newer = run.save(9)
    run.checkpoints.promote(Step(9))
    if run.attachment.rank == 1:
        path = Path(newer.uri.removeprefix("file://")) / "rng-00001.pt"
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    run.attachment.cpu_group.barrier()
    again = OneRank(root_uri, outbox, seed=2)
    point = resume(again.attachment, again.checkpoints)
    return {"older": point.checkpoint == older, "skipped": list(point.skipped)}


def nothing_ordered_exists(_: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """Every rank raises although only rank 0 was given the directive."""
    run = OneRank(root_uri, outbox, seed=1)
    directive = ResumeDirective(
        incident_id="inc-1", checkpoint_uri=f"{root_uri}/step-00000001", manifest_sha256="0" * 64, max_step=Step(1)
    )
    given = directive if run.attachment.rank == 0 else None
    return _raised(lambda: resume(run.attachment, run.checkpoints, directive=given))


def another_root(rank: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """Rank 1 is given another root."""
    return _raised(lambda: OneRank(f"{root_uri}{rank or ''}", outbox, seed=1))


def extra_of_each_rank(rank: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """What each rank gets back of extra state that differs, and of one that does not, by every way to save."""
    results = {}
    for way, options in WAYS.items():
        for extra in ({"place": rank}, {"place": "same"}):
            loaded: list[Any] = []
            root = f"{root_uri}/{way}-{extra['place'] == 'same'}"
            hooks = {"extra_save": lambda extra=extra: extra, "extra_load": loaded.append}
            run = OneRank(root, outbox, seed=1, **options, **hooks)
            run.save(4)
            run.checkpoints.finish()
            run.checkpoints.promote(Step(4))
            again = OneRank(root, outbox, seed=2, **options, **hooks)
            resume(again.attachment, again.checkpoints)
            (record,) = list_checkpoints(root)
            assert record.manifest is not None
            files = [entry.path for entry in record.manifest.files if entry.path.startswith("extra")]
            results[f"{way}, {extra['place'] == 'same'}"] = [loaded, sorted(files)]
    return results


def over_a_tombstone(rank: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """An alarm has ended the run, nobody has ordered where to resume; only rank 0 looks."""
    run = OneRank(root_uri, outbox, seed=1)
    run.save(4)
    run.checkpoints.promote(Step(4))
    if rank == 0:
        buried = Tombstone(alarm_id="ab" * 16, step=Step(9), run_id="run", attempt_id="a", at="2026-11-20T03:00:00Z")
        run.checkpoints.storage.replace(TOMBSTONE_NAME, canonical_bytes(buried))
    again = OneRank(root_uri, outbox, seed=2)
    return _raised(lambda: resume(again.attachment, again.checkpoints))


class Elsewhere(FileStorage):
    """Another volume, mounted under the path of the shared one."""

    def __init__(self, root_uri: str) -> None:
        super().__init__(Path(f"{root_uri.removeprefix('file://')}-elsewhere"))
        self._shown = root_uri

    @property
    def root_uri(self) -> str:
        return self._shown


def a_volume_of_its_own(rank: int, root_uri: str, outbox: str) -> dict[str, Any]:
    """Rank 1's node has another volume there: when it resumes, and then from the start."""
    run = OneRank(root_uri, outbox, seed=1)
    run.save(4)
    run.checkpoints.promote(Step(4))
    if rank == 1:
        run.checkpoints.storage = Elsewhere(root_uri)
        verified.open_storage = Elsewhere
    resumed = _raised(lambda: resume(run.attachment, run.checkpoints))
    return {"resumed": resumed, "started": _raised(lambda: OneRank(root_uri, outbox, seed=1))}


def _raised(act: Any) -> dict[str, Any]:
    try:
        act()
    except TruestepError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None}
