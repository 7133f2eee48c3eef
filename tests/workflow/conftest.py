"""The recovery's real definition on the engine, with scripted functions at the edge."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from local_stack import LocalStack
from tests.adapters.local_cloud.assembly import function, write_assembly
from tests.workflow.script import Invocation, Script

DEFINITION = Path(__file__).parents[2] / "state_machines" / "recovery.asl.json"
STATES: dict[str, Any] = json.loads(DEFINITION.read_text())["States"]
TIME_SCALE = 0.002
_ENDED = {"SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED"}
_incidents = itertools.count(1)


def folder_of(substitution: str) -> str:
    """`OpenIncidentArn` -> `open_incident`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", substitution.removesuffix("Arn")).lower()


SUBSTITUTIONS = sorted(set(re.findall(r"\$\{(\w+)\}", DEFINITION.read_text())))


@dataclass(frozen=True)
class Run:
    """An execution that has ended."""

    status: str
    states: list[str]
    invocations: list[Invocation]
    output: dict[str, Any] | None
    events: list[dict[str, Any]]

    def after(self, state: str) -> str:
        """Name of the first state entered after `state`'s first visit, choices and waits left out."""
        rest = self.states[self.states.index(state) + 1 :]
        return next(name for name in rest if STATES[name]["Type"] not in {"Choice", "Wait"})


class Workflow:
    """Starts executions of the recovery and waits for their end."""

    def __init__(self, stack: LocalStack, script: Script) -> None:
        self.stack = stack
        self.script = script
        self.client = stack.client("stepfunctions")

    def new_incident(self) -> str:
        return f"inc-{next(_incidents):04d}"

    def start(self, incident_id: str, *, state_machine_arn: str | None = None, resume_from: str = "") -> str:
        """Start an execution as the intake does, or as the successor of one that ended; returns its ARN."""
        chosen = {"resume_from": resume_from} if resume_from else {}
        arn: str = self.client.start_execution(
            stateMachineArn=state_machine_arn or self.stack.outputs["StateMachineArn"],
            name=incident_id,
            input=json.dumps({"incident_id": incident_id, **chosen}),
        )["executionArn"]
        return arn

    def wait(self, execution_arn: str, *, timeout_seconds: float = 30) -> Run:
        """Wait for the end. The service has no other way than to ask."""
        deadline = time.monotonic() + timeout_seconds
        while (described := self.client.describe_execution(executionArn=execution_arn))["status"] not in _ENDED:
            assert time.monotonic() < deadline, f"still {described['status']}: {self._states(execution_arn)}"
            time.sleep(0.05)
        return Run(
            status=described["status"],
            states=self._states(execution_arn),
            invocations=self.script.invocations(described["name"]),
            output=json.loads(described["output"]) if "output" in described else None,
            events=self.stack.execution_history(execution_arn),
        )

    def run(self, incident_id: str) -> Run:
        return self.wait(self.start(incident_id))

    def _states(self, execution_arn: str) -> list[str]:
        history = self.stack.execution_history(execution_arn)
        return [event["stateEnteredEventDetails"]["name"] for event in history if "stateEnteredEventDetails" in event]

    def variant(self, name: str, change: Callable[[dict[str, Any]], None]) -> str:
        """Create the recovery with a changed copy of its definition, e.g. a shorter timeout; returns its ARN."""
        recovery = self.client.describe_state_machine(stateMachineArn=self.stack.outputs["StateMachineArn"])
        definition = json.loads(recovery["definition"])
        change(definition["States"])
        created = self.client.create_state_machine(
            name=name, definition=json.dumps(definition), roleArn=recovery["roleArn"]
        )
        arn: str = created["stateMachineArn"]
        return arn


@pytest.fixture(scope="session")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workflow]:
    directory = tmp_path_factory.mktemp("workflow")
    functions = {name.removesuffix("Arn"): function("unused.handler") for name in SUBSTITUTIONS}
    recovery = {
        "Type": "AWS::StepFunctions::StateMachine",
        "Properties": {
            "StateMachineName": "recovery",
            "RoleArn": {"Fn::GetAtt": ["Role", "Arn"]},
            "DefinitionString": DEFINITION.read_text(),
            "DefinitionSubstitutions": {
                name: {"Fn::GetAtt": [name.removesuffix("Arn"), "Arn"]} for name in SUBSTITUTIONS
            },
        },
    }
    assembly = write_assembly(
        directory / "cdk.out",
        {**functions, "Recovery": recovery},
        outputs={"StateMachineArn": {"Ref": "Recovery"}},
    )
    with LocalStack(directory / "state", assembly, cluster=None, time_scale=TIME_SCALE) as stack:
        client = stack.client("stepfunctions")

        def send_token(token: str, output: dict[str, Any]) -> None:
            client.send_task_success(taskToken=token, output=json.dumps(output))

        script = Script(send_token)
        scripted = [
            replace(configuration, endpoint_url=f"{script.url}/{folder_of(configuration.name.removeprefix('test-'))}")
            for configuration in stack.deployment.functions
        ]
        stack.configure_edge({"functions": [configuration.to_json() for configuration in scripted]})
        yield Workflow(stack, script)
        script.close()
