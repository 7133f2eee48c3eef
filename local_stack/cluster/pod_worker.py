"""One pod's process: started in its own process group, watched, terminated with grace."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from local_stack.cluster.pod_log import PodLog
from local_stack.cluster.pod_sandbox import PodProcess
from local_stack.process import spawn

_LOG_DRAIN_SECONDS = 2.0


class PodWorker:
    """The running process of a pod. `on_exit(worker)` is called once, in the worker's thread, when it ended."""

    def __init__(
        self,
        uid: str,
        process: PodProcess,
        environment: dict[str, str],
        log: PodLog,
        on_exit: Callable[[PodWorker], None],
    ) -> None:
        self.uid = uid
        self.exit_code = 0
        self.node_lost = False
        self._on_exit = on_exit
        self._exited = threading.Event()
        self._termination_started = False
        self._lock = threading.Lock()
        reading, writing = os.pipe()
        try:
            self._process: subprocess.Popen[bytes] = spawn(
                process.argv,
                env=environment,
                cwd=Path(process.working_directory),
                stdout=writing,
                stderr=writing,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        log.begin()
        self._pump = threading.Thread(target=log.pump, args=(os.fdopen(reading, "rb"),), daemon=True)
        self._pump.start()
        threading.Thread(target=self._wait, name=f"pod {uid}", daemon=True).start()

    @property
    def ended(self) -> bool:
        """True once the process and everything in its group is gone."""
        return self._exited.is_set()

    def terminate(self, grace_seconds: float) -> None:
        """SIGTERM to the group, SIGKILL after the grace; returns at once. A second call changes nothing."""
        with self._lock:
            if self._termination_started:
                return
            self._termination_started = True
        threading.Thread(target=self._terminate, args=(grace_seconds,), daemon=True).start()

    def kill(self, *, node_lost: bool = False) -> None:
        """SIGKILL to the group: the node lost power, or the grace is over."""
        self.node_lost = self.node_lost or node_lost
        self._signal(signal.SIGKILL)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the end. False if it did not come in time."""
        return self._exited.wait(timeout_seconds)

    def _terminate(self, grace_seconds: float) -> None:
        self._signal(signal.SIGTERM)
        if not self._exited.wait(grace_seconds):
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            # Under the lock the leader is not reaped, so its group id cannot have passed to somebody else.
            if not self._exited.is_set():
                try:
                    os.killpg(self._process.pid, number)
                except ProcessLookupError:
                    return

    def _wait(self) -> None:
        # Not reaped yet: the group's id stays ours until the rest of the group is killed.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)
        with self._lock:
            code = self._process.wait()
            self.exit_code = code if code >= 0 else 128 - code
            self._exited.set()
        self._pump.join(_LOG_DRAIN_SECONDS)
        self._on_exit(self)
