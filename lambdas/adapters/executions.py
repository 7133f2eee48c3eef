"""`lambdas.ports.Executions` on Step Functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors

_ALREADY_DECIDED: Final = frozenset({"InvalidToken", "TaskDoesNotExist", "TaskTimedOut"})
"""What a token that was used, replaced or has timed out answers, depending on how long ago that was."""


class StepFunctions:
    """Starts the workflow and completes its waiting states. `client` is a boto3 Step Functions client."""

    def __init__(self, client: Any, state_machine_arn: str = "") -> None:
        self._client = client
        self._state_machine_arn = state_machine_arn

    def start(self, incident_id: str) -> None:
        """Start the workflow for the incident; starting it twice is once, because the name is the incident's id."""
        try:
            with transient_errors():
                self._client.start_execution(
                    stateMachineArn=self._state_machine_arn,
                    name=incident_id,
                    input=json.dumps({"incident_id": incident_id}),
                )
        except ClientError as error:
            if error_code(error) != "ExecutionAlreadyExists":
                raise

    def complete(self, task_token: str, output: Mapping[str, object]) -> bool:
        """Let a waiting state go on. False where the token was used before or its state is over: already decided."""
        if not task_token:
            return False
        try:
            with transient_errors():
                self._client.send_task_success(taskToken=task_token, output=json.dumps(output))
        except ClientError as error:
            if error_code(error) not in _ALREADY_DECIDED:
                raise
            return False
        return True
