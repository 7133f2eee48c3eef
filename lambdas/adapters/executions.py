"""`lambdas.ports.Executions` on Step Functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.domain.workflow import is_anothers, successor_name
from truestep.contract import parse_json

_ALREADY_DECIDED: Final = frozenset({"InvalidToken", "TaskDoesNotExist", "TaskTimedOut"})
"""What a token that was used, replaced or has timed out answers, depending on how long ago that was."""
_NO_SUCH: Final = frozenset({"ExecutionDoesNotExist", "InvalidArn"})


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What Step Functions says of an execution."""

    arn: str
    state_machine_arn: str
    status: str
    """``RUNNING``, ``SUCCEEDED``, ``FAILED``, ``TIMED_OUT`` or ``ABORTED``."""
    given: str
    """Its input, as JSON text."""
    why: str = ""
    """Error and cause of one that did not succeed, where it has them."""
    stopped_at: datetime | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.status == "RUNNING"

    @property
    def begins_with(self) -> str:
        """The incident that it takes up at the first state; empty where it begins elsewhere, or with none."""
        try:
            given = parse_json(self.given)
        except ValueError:
            return ""
        begins = isinstance(given, Mapping) and "resume_from" not in given
        return str(given.get("incident_id") or "") if begins else ""


class StepFunctions:
    """Starts the workflow and completes its waiting states. `client` is a boto3 Step Functions client."""

    def __init__(self, client: Any, state_machine_arn: str = "") -> None:
        self._client = client
        self._state_machine_arn = state_machine_arn

    def start(self, incident_id: str) -> None:
        """Start the workflow for the incident; starting it twice is once, because the name is the incident's id."""
        self._start(incident_id, {"incident_id": incident_id})

    def succeed(self, execution: str, incident_id: str, resume_from: str) -> str:
        """Start the successor of an execution that ended, at a state; returns its ARN.

        Twice is once: its name follows from the ended one's ARN, and Step Functions keeps names for 90 days.
        """
        successor = self.successor(execution, incident_id)
        self._start(successor.rpartition(":")[2], {"incident_id": incident_id, "resume_from": resume_from})
        return successor

    def successor(self, execution: str, incident_id: str) -> str:
        """ARN that the successor of an execution has, or would have."""
        return self._arn(successor_name(execution, incident_id))

    def running(self, incident_id: str, recorded: str, *, besides: str = "") -> str:
        """ARN of the incident's execution that runs now, or empty: the one that intake started, or a successor.

        recorded: ARN of the one that the incident names; one that was started by hand is known by that alone. besides:
        ARN of one that is not meant.
        """
        seen: set[str] = set()
        for arn in filter(None, (self._arn(incident_id), recorded)):
            while arn not in seen and (found := self.find(arn)) is not None:
                if found.running and arn != besides:
                    return arn
                seen.add(arn)
                arn = self.successor(arn, incident_id)
        return ""

    def started_by_hand(self, incident_id: str) -> str:
        """ARN of a running execution that somebody has given this incident to take up, or empty.

        Its name is anybody's choice, so that its input is asked for. What is listed follows what happens by a moment.
        """
        pages = self._client.get_paginator("list_executions")
        with transient_errors():
            for page in pages.paginate(stateMachineArn=self._state_machine_arn, statusFilter="RUNNING"):
                for listed in page["executions"]:
                    if is_anothers(listed["name"], incident_id):
                        continue
                    found = self.find(listed["executionArn"])
                    if found is not None and found.running and found.begins_with == incident_id:
                        return found.arn
        return ""

    def _arn(self, name: str) -> str:
        return f"{self._state_machine_arn.replace(':stateMachine:', ':execution:', 1)}:{name}"

    def _start(self, name: str, given: Mapping[str, str]) -> None:
        try:
            with transient_errors():
                self._client.start_execution(
                    stateMachineArn=self._state_machine_arn, name=name, input=json.dumps(given)
                )
        except ClientError as error:
            if error_code(error) != "ExecutionAlreadyExists":
                raise

    def ended(self, execution: str) -> bool:
        """Whether the execution is over. One that is not known any more is: Step Functions forgets after 90 days."""
        found = self.find(execution)
        return found is None or not found.running

    def find(self, execution: str) -> Execution | None:
        """The execution of this ARN, or None where Step Functions knows none."""
        try:
            with transient_errors():
                found = self._client.describe_execution(executionArn=execution)
        except ClientError as error:
            if error_code(error) not in _NO_SUCH:
                raise
            return None
        return Execution(
            arn=found["executionArn"],
            state_machine_arn=found["stateMachineArn"],
            status=found["status"],
            given=found.get("input", ""),
            why=": ".join(found[name] for name in ("error", "cause") if found.get(name)),
            stopped_at=found.get("stopDate"),
        )

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
