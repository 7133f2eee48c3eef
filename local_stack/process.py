"""Start processes that die with this one, wait until they serve, and stop them in order.

Every child runs in its own process group, behind `local_stack.tether`. The kernel's parent-death signal fires when the
*thread* that forked ends, not the process; so all children are forked by one thread that lives as long as this process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_TETHER = Path(__file__).with_name("tether.py")
_HAS_PARENT_DEATH_SIGNAL = sys.platform == "linux"


class ProcessError(RuntimeError):
    """A child could not be started or did not become ready; the message carries the end of its log."""


def tethered(
    argv: Sequence[str], *, watchdog: bool = not _HAS_PARENT_DEATH_SIGNAL
) -> tuple[list[str], tuple[int, ...]]:
    """Return the command that runs `argv` tied to the calling process, and the descriptors that it must inherit.

    For callers that fork themselves (asyncio): they must fork from a thread that lives as long as the process.
    watchdog: use the portable lifeline instead of the kernel's parent-death signal.
    """
    # -I and -S: neither the command's PYTHONPATH nor site-packages count for the launcher, which starts twice as fast.
    command = [sys.executable, "-I", "-S", str(_TETHER), "--parent", str(os.getpid())]
    descriptors = (_lifeline_fd(),) if watchdog else ()
    for descriptor in descriptors:
        command += ["--lifeline", str(descriptor)]
    return [*command, "--", *argv], descriptors


class _Forker:
    """The thread that forks. Daemon: it ends with the process and never before."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], Future[subprocess.Popen[bytes]]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="local-stack-forker", daemon=True).start()

    def fork(self, **popen_arguments: Any) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((popen_arguments, started))
        return started.result()

    def _run(self) -> None:
        while True:
            arguments, started = self._requests.get()
            try:
                started.set_result(subprocess.Popen(**arguments))
            except BaseException as error:
                started.set_exception(error)


_forker: _Forker | None = None
_forker_lock = threading.Lock()
_lifeline: tuple[int, int] | None = None


def _current_forker() -> _Forker:
    global _forker
    with _forker_lock:
        if _forker is None or _forker.pid != os.getpid():  # threads do not survive a fork of this process
            _forker = _Forker()
        return _forker


def _lifeline_fd() -> int:
    """Reading end of a pipe whose writing end only this process has: it closes when this process ends."""
    global _lifeline
    with _forker_lock:
        if _lifeline is None:
            _lifeline = os.pipe()
        return _lifeline[0]


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    pass_fds: Sequence[int] = (),
    watchdog: bool = not _HAS_PARENT_DEATH_SIGNAL,
) -> subprocess.Popen[bytes]:
    """Start `argv` in its own process group, tied to this process; any thread may call.

    env: the whole environment of the child; None inherits. watchdog: use the portable lifeline instead of the kernel's
    parent-death signal. Raises ProcessError where the working directory does not exist.
    """
    command, descriptors = tethered(argv, watchdog=watchdog)
    try:
        return _current_forker().fork(
            args=command,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(*pass_fds, *descriptors),
            process_group=0,
        )
    except OSError as error:
        raise ProcessError(f"cannot start {argv[0]} in {cwd or Path.cwd()}: {error}") from error


def signal_group(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """Send a signal to every process in the child's group; a group that is gone is no error."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        return


def stop(processes: Iterable[subprocess.Popen[bytes]], *, grace_seconds: float = 5.0) -> None:
    """Stop all: SIGTERM together, and SIGKILL for the groups of those that still run after `grace_seconds`."""
    remaining = list(processes)
    for process in remaining:
        signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for process in remaining:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            signal_group(process, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True, kw_only=True)
class Server:
    """A child that serves: its process and what it announced (one JSON object, at least its ports)."""

    name: str
    process: subprocess.Popen[bytes]
    announcement: Mapping[str, Any]
    log_path: Path


class PendingServer:
    """A server that was started and has not announced itself yet; start several, then wait for each."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path
        self._announcement: Future[dict[str, Any]] = Future()
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Take the first JSON line of the child's standard output; everything else goes to its log."""
        output = self.process.stdout
        if output is None:
            raise AssertionError("a server's standard output is a pipe")
        with self.log_path.open("ab", buffering=0) as log, output:
            for line in output:
                if not self._announcement.done() and line.startswith(b"{"):
                    try:
                        self._announcement.set_result(json.loads(line))
                        continue
                    except ValueError:
                        pass
                log.write(line)
        if not self._announcement.done():
            self._announcement.set_exception(ProcessError(f"{self.name} ended before it was ready"))

    def join_output(self) -> None:
        """Wait until everything that the child printed is in its log; only for a child that has ended."""
        self._reader.join()

    def wait_ready(self, *, timeout_seconds: float = 30.0) -> Server:
        """Wait for the announcement. Raises ProcessError, with the end of the log, if the child ends or is too slow."""
        try:
            announcement = self._announcement.result(timeout_seconds)
        except (ProcessError, TimeoutError) as error:
            stop([self.process], grace_seconds=0.5)
            reason = str(error) or f"{self.name} was not ready within {timeout_seconds:g} s"
            raise ProcessError(f"{reason}; end of {self.log_path}:\n{_tail(self.log_path)}") from error
        return Server(name=self.name, process=self.process, announcement=announcement, log_path=self.log_path)


def start_server(
    name: str,
    argv: Sequence[str],
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    pass_fds: Sequence[int] = (),
) -> PendingServer:
    """Start a server that prints one JSON line on standard output when it serves; the rest of its output is its log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = spawn(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=log, pass_fds=pass_fds)
    return PendingServer(name, process, log_path)


def announce(**values: Any) -> None:
    """Tell the parent, from a server's process, that it serves: one JSON line on standard output."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _tail(path: Path, *, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
