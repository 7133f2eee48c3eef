"""Gap: for the first instant of its life an execution has no environment, and a token sent to *another* execution then
ends in HTTP 500, because tokens are looked up through every running execution."""

from __future__ import annotations

from typing import Any

from moto.stepfunctions.parser.models import StepFunctionsParserBackend


def install() -> None:
    """Leave executions without an environment out of the look-up: they hold no token yet."""
    executions_of = StepFunctionsParserBackend._get_executions

    def executions_with_environment(self: Any, execution_status: Any = None) -> list[Any]:
        return [
            execution
            for execution in executions_of(self, execution_status)
            if execution.exec_worker is not None and execution.exec_worker.env is not None
        ]

    StepFunctionsParserBackend._get_executions = executions_with_environment
