"""Real processes over Gloo: one machine-wide lock, a store without a port, a hard timeout."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

import pytest

TIMEOUT_SECONDS = 240.0
ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    *("torch", "torch._dynamo", "torch.profiler"),
    *("truestep.resumption", "truestep.report", "truestep.bundle", "truestep.integrations"),
    *("tests.distributed.conftest", "tests.distributed.scenarios", "tests.distributed.features"),
)
"""What takes long to import and every process needs, paid once by the fork server. DDP and the optimizers import dynamo
when they are first used, and a process finds its function in a module that imports pytest."""


class RunRanks(Protocol):
    """What the fixture gives."""

    def __call__(
        self,
        scenario: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        nodes: list[str] | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """Run `scenario(rank, *arguments, **keywords)` in `world_size` processes; their results (JSON), in rank
        order."""


def _child(
    scenario: Callable[..., Any], rank: int, world_size: int, directory: str, node: str, arguments: Any, keywords: Any
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=node, RANK=str(rank), LOCAL_RANK="0", TRUESTEP_RUN_ID="test-run")
    os.environ["TRUESTEP_SIMULATED_GPU_UUID"] = f"GPU-{node}-{rank}"
    os.environ["TRUESTEP_OUTBOX_DIR"] = f"{directory}/outbox"
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/resume.json"
    root = Path(directory)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        result = scenario(rank, *arguments, **keywords)
        (root / f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (root / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="session")
def process_context() -> multiprocessing.context.ForkServerContext:
    """Children fork from a server that has imported torch already: a tenth of a second each instead of seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    # The server does not inherit sys.path: without this it would import whatever truestep is installed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "trainer_sdk" / "src")]))
        forkserver.ensure_running()
    return context


@pytest.fixture
def distributed_lock() -> Iterator[None]:
    """One distributed test at a time on this machine: they time each other out on few cores."""
    path = Path(tempfile.gettempdir()) / "truestep-distributed-tests.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def run_ranks(
    process_context: multiprocessing.context.ForkServerContext, distributed_lock: None, tmp_path: Path
) -> RunRanks:
    """Runs a scenario on real processes; fails with every rank's traceback, or after `TIMEOUT_SECONDS`."""
    runs = iter(range(1000))

    def run(
        scenario: Callable[..., Any], world_size: int, *arguments: Any, nodes: list[str] | None = None, **keywords: Any
    ) -> list[Any]:
        directory = tmp_path / f"run-{next(runs)}"
        directory.mkdir()
        placed = nodes or [f"node-{rank}" for rank in range(world_size)]
        children = [
            process_context.Process(
                target=_child,
                args=(scenario, rank, world_size, str(directory), placed[rank], arguments, keywords),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
        return _collect(children, directory)

    return run


def _collect(children: list[Any], directory: Path) -> list[Any]:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    late = [index for index, child in enumerate(children) if child.is_alive()]
    for index in late:
        children[index].kill()
        children[index].join()
    errors = {path.name: path.read_text() for path in sorted(directory.glob("error-*.txt"))}
    if errors or late:
        shown = "\n".join(f"--- {name}\n{text}" for name, text in errors.items())
        pytest.fail(f"ranks {late} were still running after {TIMEOUT_SECONDS} s\n{shown}" if late else shown)
    results: list[Any] = [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(len(children))]
    return results


def exit_codes(children: Sequence[Any], failing: int, *, stays: bool, within: float) -> list[int | None]:
    """How started children ended, each waited for as long as `within` seconds: the others first, and then the failing
    one, which is killed where it stays on."""
    for child in (child for rank, child in enumerate(children) if rank != failing):
        child.join(within)
    if stays:
        children[failing].kill()
    for child in children:
        child.join(within)
    return [child.exitcode for child in children]


def same_everywhere(results: Sequence[Mapping[str, Any]], key: str) -> Any:
    """The value that every rank returned under `key`; fails where they differ."""
    values = [result[key] for result in results]
    assert all(value == values[0] for value in values), f"ranks disagree on {key}: {values}"
    return values[0]
