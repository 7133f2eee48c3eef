"""Gap: while a task waits for its token, TimeoutSeconds does not bound a heartbeat, StopExecution does not wake it, and
an expired heartbeat is reported as `States.Timeout` instead of `States.HeartbeatTimeout`."""

from __future__ import annotations

import time
from typing import Any

from moto.stepfunctions.parser.asl.component.common.error_name.states_error_name import StatesErrorName
from moto.stepfunctions.parser.asl.component.common.error_name.states_error_name_type import StatesErrorNameType
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_callback import (
    StateTaskServiceCallback,
)
from moto.stepfunctions.parser.asl.eval.callback.callback import (
    CallbackOutcomeTimedOut,
    HeartbeatTimedOut,
    HeartbeatTimeoutError,
)

_HEARTBEAT = "States.HeartbeatTimeout"
# The engine wakes a waiting task only through its token's event; a stopped execution is noticed at this interval.
_STOP_CHECK_SECONDS = 0.1


def wait_for_token(_task: Any, env: Any, timeout_seconds: int, callback_endpoint: Any, heartbeat_endpoint: Any) -> Any:
    """Wait for the token's outcome, its heartbeat's or its time's expiry, or the end of the execution."""
    started = last_beat = time.monotonic()
    while env.is_running():
        now = time.monotonic()
        if heartbeat_endpoint is not None and heartbeat_endpoint._next_heartbeat_event.is_set():
            heartbeat_endpoint._next_heartbeat_event.clear()
            last_beat = now
        outcome = callback_endpoint.get_outcome()
        if outcome is not None:
            return outcome
        remaining = started + timeout_seconds - now
        if remaining <= 0:
            break
        if heartbeat_endpoint is not None:
            until_beat = last_beat + heartbeat_endpoint._heartbeat_seconds - now
            if until_beat <= 0:
                return HeartbeatTimedOut()
            remaining = min(remaining, until_beat)
        callback_endpoint._notify_event.wait(min(remaining, _STOP_CHECK_SECONDS))
    return CallbackOutcomeTimedOut(callback_id=callback_endpoint.callback_id)


def install() -> None:
    """Replace the engine's wait and name an expired heartbeat."""
    failure_of = StateTaskServiceCallback._from_error

    def named_failure(self: Any, env: Any, ex: Exception) -> Any:
        failure = failure_of(self, env, ex)
        if isinstance(ex, HeartbeatTimeoutError):
            failure.error_name = StatesErrorName(typ=StatesErrorNameType.StatesHeartbeatTimeout)
            failure.event_details["taskTimedOutEventDetails"]["error"] = _HEARTBEAT
        return failure

    StateTaskServiceCallback._eval_wait_for_task_token = wait_for_token
    StateTaskServiceCallback._from_error = named_failure
