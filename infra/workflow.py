"""The state machines, from the files that are also run locally."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.catalogue import DECIDE_APPROVAL, WORKFLOW_FUNCTIONS, FunctionSpec
from infra.configuration import DeploymentSettings
from infra.errors import PreparationError
from infra.functions import Functions, retention
from infra.paths import APPROVE_DEFINITION, DEFINITION, REPOSITORY

RECOVERY, APPROVE = "recovery", "approve"

_SUBSTITUTION = re.compile(r"\$\{([A-Za-z0-9]+)\}")


class Workflow(Construct):
    """State machines ``recovery``, and ``approve`` for decisions in the console.

    Each has a role of its own, which may invoke the functions that its definition names, and nothing else.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, settings: DeploymentSettings, functions: Functions
    ) -> None:
        super().__init__(scope, construct_id)
        self._settings = settings
        self._functions = functions
        self.recovery = self._machine(RECOVERY, DEFINITION, WORKFLOW_FUNCTIONS)
        self.approve = self._machine(APPROVE, APPROVE_DEFINITION, (DECIDE_APPROVAL,))

    def _machine(self, name: str, path: Path, known: tuple[FunctionSpec, ...]) -> stepfunctions.StateMachine:
        definition = read_definition(path)
        invoked = self._invoked(path, definition, known)
        construct_id = name.capitalize()
        role = iam.Role(self, f"{construct_id}Role", assumed_by=iam.ServicePrincipal("states.amazonaws.com"))
        # The function itself and not its versions: an execution always runs the code that is deployed.
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["lambda:InvokeFunction"], resources=[function.function_arn for function in invoked.values()]
            )
        )
        acknowledge(
            role,
            "Delivery of state machine logs and X-Ray segments know no resource-level permissions.",
            "IAM5[Resource::*]",
        )
        full_name = state_machine_name(self._settings.stage, name)
        return stepfunctions.StateMachine(
            self,
            construct_id,
            state_machine_name=full_name,
            definition_body=stepfunctions.DefinitionBody.from_string(definition),
            definition_substitutions={name: function.function_arn for name, function in invoked.items()},
            role=role,
            tracing_enabled=True,
            logs=stepfunctions.LogOptions(
                destination=logs.LogGroup(
                    self,
                    f"{construct_id}Logs",
                    log_group_name=f"/aws/vendedlogs/states/{full_name}",
                    retention=retention(self._settings.log_retention_days),
                    removal_policy=cdk.RemovalPolicy.DESTROY,
                ),
                level=stepfunctions.LogLevel.ALL,
                # Execution data holds task tokens, and whoever has one decides.
                include_execution_data=False,
            ),
        )

    def _invoked(self, path: Path, definition: str, specs: tuple[FunctionSpec, ...]) -> Mapping[str, lambda_.Function]:
        known = {spec.substitution: self._functions.by_folder[spec.folder] for spec in specs}
        used = sorted(set(_SUBSTITUTION.findall(definition)))
        if unknown := [name for name in used if name not in known]:
            raise PreparationError(
                f"{path.name} refers to ${{{unknown[0]}}}, but no function of infra/catalogue.py that it may invoke "
                f"has it; known are {', '.join(sorted(known))}"
            )
        return {name: known[name] for name in used}


def state_machine_name(stage: str, name: str) -> str:
    """Fixed, so that functions can be told the ARN before the state machine, which needs them, exists."""
    return f"truestep-{stage}-{name}"


def state_machine_arn(stack: cdk.Stack, stage: str, name: str) -> str:
    """ARN of the state machine, without depending on it."""
    return stack.format_arn(
        service="states",
        resource="stateMachine",
        resource_name=state_machine_name(stage, name),
        arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
    )


def read_definition(path: Path) -> str:
    """Text of a definition. Raises PreparationError where the file is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path.name
        raise PreparationError(f"{shown} is missing; it defines the order of the functions") from error
