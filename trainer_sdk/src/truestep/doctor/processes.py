"""The examination on one machine: a user's function in several processes over Gloo, each standing for a node."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from truestep.contract import TruestepError, from_json, to_json
from truestep.doctor.diagnosis import Diagnosis

_PRELOADED = ["torch", "torch._dynamo", "truestep.doctor.examination"]
"""DDP imports dynamo when it is first used: seconds a process, which a fork server pays once."""


_STANDARD_LIBRARY = str(Path(os.__file__).parent)


class ScriptError(TruestepError):
    """The script's function cannot be used; says what it must be."""


def examine_script(script: str, processes: int, timeout_seconds: float) -> Diagnosis:
    """Run `module:function` (or `path.py:function`) in `processes` processes and examine what it returns.

    The function is called in every process, after `torch.distributed` was initialised, and returns an `Examined`.
    Raises `ScriptError` where it cannot be imported or called, returns something else, or takes too long.
    """
    module, _, function = script.partition(":")
    if not module or not function:
        raise ScriptError(f"--script is {script!r}; give module:function, for example train:pieces or train.py:pieces")
    if processes < 2:
        raise ScriptError(f"--processes is {processes}; it takes two at least to compare, and three to name one")
    module, path = _importable(module)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="truestep-doctor-") as directory:
        children = [
            context.Process(target=_child, args=(module, function, rank, processes, directory, path), daemon=True)
            for rank in range(processes)
        ]
        for child in children:
            child.start()
        _wait(children, Path(directory), timeout_seconds)
        return from_json(Diagnosis, json.loads((Path(directory) / "diagnosis.json").read_text()))


def _importable(module: str) -> tuple[str, list[str]]:
    """The module's name and the search path; a file is found where it lies, as `python train.py` does."""
    if not module.endswith(".py"):
        return module, sys.path
    file = Path(module).resolve()
    if not file.is_file():
        raise ScriptError(f"there is no file {file}; give module:function or file.py:function")
    return file.stem, [str(file.parent), *sys.path]


def _wait(children: Sequence[BaseProcess], directory: Path, timeout_seconds: float) -> None:
    """Until all have ended well. One that fails ends the others: they would wait for it."""
    deadline = time.monotonic() + timeout_seconds
    try:
        while any(child.is_alive() for child in children):
            failed = [rank for rank, child in enumerate(children) if child.exitcode not in (None, 0)]
            if failed:
                break
            if time.monotonic() > deadline:
                raise ScriptError(
                    f"the examination took more than {timeout_seconds:.0f} s; give --timeout more seconds"
                )
            time.sleep(0.05)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    # Whoever failed first wrote before its connections closed; the others' errors are about those.
    reports = sorted(directory.glob("error-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        raise ScriptError(f"process {reports[0].stem.rpartition('-')[2]}: {reports[0].read_text()}")
    for rank, child in enumerate(children):
        if child.exitcode not in (0, -signal.SIGKILL):
            raise ScriptError(f"process {rank} ended with exit code {child.exitcode} and said nothing")


def _child(module: str, function: str, rank: int, world_size: int, directory: str, path: list[str]) -> None:
    sys.path[:] = path
    try:
        diagnosis = _examine(module, function, rank, world_size, directory)
    except BaseException as error:
        told = str(error) if isinstance(error, TruestepError) else _told(error, f"{module}:{function}")
        (Path(directory) / f"error-{rank}.txt").write_text(told)
        raise SystemExit(1) from None
    if rank == 0:
        (Path(directory) / "diagnosis.json").write_text(json.dumps(to_json(diagnosis)))


def _told(error: BaseException, script: str) -> str:
    """What failed in the user's code, and where: the last place that is neither Python's nor a package's."""
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _STANDARD_LIBRARY + os.sep))
        and "site-packages" not in frame.filename
        and not frame.filename.startswith(str(Path(__file__).parents[1]))
    ]
    where = f", at {places[-1].filename}:{places[-1].lineno} ({places[-1].line})" if places else ""
    return f"{script} raised {type(error).__name__}: {error}{where}; mend it, and run the doctor again"


def _examine(module: str, function: str, rank: int, world_size: int, directory: str) -> Diagnosis:
    import torch.distributed as dist

    # What matters of a script comes as an observation. That no bus is set, or few nodes are, is how it is examined.
    logging.getLogger("truestep").setLevel(logging.ERROR)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", NODE_NAME=f"process-{rank}")
    os.environ.update(TRUESTEP_OUTBOX_DIR=f"{directory}/outbox", TRUESTEP_DIRECTIVE=f"{directory}/none.json")
    pieces = _function(module, function)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    diagnosis = _diagnose(pieces, f"{module}:{function}")
    dist.barrier()
    # Where no model lives any more. DDP's reducer, if it outlives the group, ends Gloo's threads with the GIL held, and
    # one that has just finished a collective waits for the GIL to let go of it: neither ever goes on (torch 2.13).
    dist.destroy_process_group()
    return diagnosis


def _diagnose(pieces: Any, script: str) -> Diagnosis:
    from truestep.attachment import attach
    from truestep.doctor.examination import Examined, examine

    examined = pieces()
    if not isinstance(examined, Examined):
        raise ScriptError(
            f"{script} returned {type(examined).__name__}; return truestep.doctor.Examined(ddp_model, "
            "compute_loss, batch, rebuild_batch)"
        )
    return examine(attach(examined.ddp_model), examined)


def _function(module: str, name: str) -> Any:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ScriptError(f"no module {module!r}; call the doctor where python -m {module} would run") from error
    if not callable(found):
        raise ScriptError(f"module {module!r} has no function {name!r}")
    return found
