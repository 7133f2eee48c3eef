"""Gap: a token that was used, or whose task has moved on, is accepted again while the execution runs; the first answer
can be overwritten by a second one; a retried task waits for its first token again; SendTaskFailure loses its cause.

On Step Functions the first answer counts, every later one is `TaskTimedOut`, and each attempt has a token of its own.
"""

from __future__ import annotations

import threading
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.core.responses import EmptyResult
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.resource import ResourceCondition
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_callback import (
    StateTaskServiceCallback,
)
from moto.stepfunctions.parser.asl.eval.callback.callback import CallbackConsumerTimeout, CallbackPoolManager
from moto.stepfunctions.responses import StepFunctionResponse

_answering = threading.Lock()


def task_timed_out() -> Exception:
    """Return the error of a token whose task is over."""
    error: Exception = JsonRESTError("TaskTimedOut", "Task Timed Out: 'Provided task does not exist anymore'")
    return error


def answer_once(self: Any, callback_id: str, outcome: Any) -> bool:
    """Give the task its outcome. False where the token is unknown; raises TaskTimedOut for a second or late answer."""
    with _answering:
        endpoint = self._pool.get(callback_id)
        if endpoint is None:
            return False
        if endpoint.get_outcome() is not None or endpoint.consumer_error is not None:
            raise task_timed_out()
        endpoint.notify(outcome=outcome)
        return True


def beat_while_waiting(self: Any, callback_id: str) -> bool:
    """Record a heartbeat. False where the token is unknown; raises TaskTimedOut where its task is over."""
    with _answering:
        endpoint = self._pool.get(callback_id)
        if endpoint is None:
            return False
        if endpoint.get_outcome() is not None or endpoint.consumer_error is not None:
            raise task_timed_out()
        endpoint.notify_heartbeat()
        return True


def fail_with_cause(self: Any) -> Any:
    """SendTaskFailure with both its members."""
    self.stepfunction_backend.send_task_failure(
        self._get_param("taskToken"), error=self._get_param("error"), cause=self._get_param("cause")
    )
    return EmptyResult()


def install() -> None:
    """Close tokens when their task is over, and let one answer count."""
    wait = StateTaskServiceCallback._eval_wait_for_task_token

    def wait_and_close(
        self: Any, env: Any, timeout_seconds: int, callback_endpoint: Any, heartbeat_endpoint: Any
    ) -> Any:
        outcome = wait(self, env, timeout_seconds, callback_endpoint, heartbeat_endpoint)
        with _answering:
            callback_endpoint.report(CallbackConsumerTimeout())
            # An answer accepted just before the task gave up has to count: its sender was told so.
            return callback_endpoint.get_outcome() or outcome

    attempt = StateTaskServiceCallback._evaluate_with_timeout

    def attempt_with_own_token(self: Any, env: Any) -> None:
        context = env.states.context_object
        is_retry = context.context_object_data["State"]["RetryCount"] > 0
        if is_retry and self.resource.condition == ResourceCondition.WaitForTaskToken:
            env.callback_pool_manager.add(context.update_task_token())
        attempt(self, env)

    StateTaskServiceCallback._evaluate_with_timeout = attempt_with_own_token
    StateTaskServiceCallback._eval_wait_for_task_token = wait_and_close
    CallbackPoolManager.notify = answer_once
    CallbackPoolManager.heartbeat = beat_while_waiting
    StepFunctionResponse.send_task_failure = fail_with_cause
