"""Gap: StopExecution drops its error and cause, and a state that ends afterwards turns ABORTED into FAILED."""

from __future__ import annotations

from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.stepfunctions.parser.asl.eval.environment import Environment
from moto.stepfunctions.parser.asl.eval.program_state import ProgramStopped
from moto.stepfunctions.responses import StepFunctionResponse


def stop_with_reason(self: Any) -> Any:
    """StopExecution with all its members; raises ExecutionDoesNotExist as moto does."""
    error, cause = self._get_param("error"), self._get_param("cause")
    execution = self.stepfunction_backend.describe_execution(self._get_param("executionArn"))
    now = utcnow()
    if execution.stop_date is None:
        execution.stop(stop_date=now, error=error, cause=cause)
        execution.error, execution.cause = error, cause
    return ActionResult({"stopDate": execution.stop_date or now})


def install() -> None:
    """Keep the reason, and let a stopped execution stay stopped."""
    set_error = Environment.set_error

    def set_error_unless_stopped(self: Any, error: Any) -> None:
        if not isinstance(self._program_state, ProgramStopped):
            set_error(self, error)

    StepFunctionResponse.stop_execution = stop_with_reason
    Environment.set_error = set_error_unless_stopped
