"""Gap: waits and retry intervals cannot be shortened, and a stopped wait is noticed late where two events coincide.

Timeouts and heartbeats are never scaled: they bound real work.
"""

from __future__ import annotations

import time
from typing import Any

from moto.stepfunctions.parser.asl.component.common.retry import retrier_decl
from moto.stepfunctions.parser.asl.component.state.wait.wait_function.wait_function import WaitFunction


class _ScaledClock:
    """What a retrier uses of `time`."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds * self._scale)


def wait_while_running(env: Any, seconds: float) -> None:
    """Wait, at most until the execution is stopped; the engine's event is set on any change of the program's state."""
    deadline = time.monotonic() + seconds
    while env.is_running() and (remaining := deadline - time.monotonic()) > 0:
        env.program_state_event.wait(min(remaining, 0.5))


def install(scale: float) -> None:
    """Multiply the waits and retry intervals of executions by `scale` (positive)."""
    if scale <= 0:
        raise ValueError(f"the time scale must be positive, not {scale}")

    def wait_scaled(_wait: Any, env: Any, wait_seconds: float) -> None:
        wait_while_running(env, wait_seconds * scale)

    WaitFunction._wait_interval = wait_scaled
    retrier_decl.time = _ScaledClock(scale)
