"""Gap: Step Functions tells the default event bus when an execution changes its status; moto tells nobody.

Here of the end alone: nothing that is deployed listens for a start. Fields as in the Step Functions developer guide,
"EventBridge for execution status changes"; times in milliseconds.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from moto.events.models import events_backends
from moto.stepfunctions.parser.asl.utils.encoding import to_json_str
from moto.stepfunctions.parser.backend.execution import BaseExecutionWorkerCommunication

_SOURCE, _DETAIL_TYPE = "aws.states", "Step Functions Execution Status Change"


def status_change(execution: Any) -> dict[str, Any]:
    """The event of the execution as it is now."""
    described = execution.to_describe_output()
    detail = {
        "executionArn": described["executionArn"],
        "stateMachineArn": described["stateMachineArn"],
        "name": described["name"],
        "status": str(described["status"].value),
        "startDate": _milliseconds(described["startDate"]),
        "stopDate": _milliseconds(described["stopDate"]),
        "input": to_json_str(execution.input_data),
        "inputDetails": {"included": True},
        **{name: described.get(name) for name in ("output", "error", "cause")},
    }
    return {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": _DETAIL_TYPE,
        "source": _SOURCE,
        "account": execution.account_id,
        "time": described["stopDate"].timestamp(),
        "region": execution.region_name,
        "resources": [described["executionArn"]],
        "detail": detail,
    }


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def install() -> None:
    """Give every rule of the default bus the end of each execution."""
    reflect = BaseExecutionWorkerCommunication.terminated

    def reflect_and_tell(self: Any) -> None:
        reflect(self)
        execution = self.execution
        bus = events_backends[execution.account_id][execution.region_name].event_buses["default"]
        event = status_change(execution)
        for rule in list(bus.rules.values()):
            rule.send_to_targets(event)

    BaseExecutionWorkerCommunication.terminated = reflect_and_tell
