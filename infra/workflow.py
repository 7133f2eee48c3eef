"""The state machine, from the file that is also run locally."""

from __future__ import annotations

import re
from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.catalogue import WORKFLOW_FUNCTIONS
from infra.configuration import DeploymentSettings
from infra.errors import PreparationError
from infra.functions import Functions, retention
from infra.paths import DEFINITION, REPOSITORY

_NAME = DEFINITION.relative_to(REPOSITORY)
_SUBSTITUTION = re.compile(r"\$\{([A-Za-z0-9]+)\}")


class Workflow(Construct):
    """State machine ``recovery``; may invoke the functions that its definition names, and nothing else."""

    def __init__(
        self, scope: Construct, construct_id: str, *, settings: DeploymentSettings, functions: Functions
    ) -> None:
        super().__init__(scope, construct_id)
        definition = read_definition()
        invoked = _invoked(definition, functions)
        role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("states.amazonaws.com"))
        # The function itself and not its versions: an execution always runs the code that is deployed.
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["lambda:InvokeFunction"], resources=[function.function_arn for function in invoked.values()]
            )
        )
        self.state_machine = stepfunctions.StateMachine(
            self,
            "Recovery",
            state_machine_name=state_machine_name(settings.stage),
            definition_body=stepfunctions.DefinitionBody.from_string(definition),
            definition_substitutions={name: function.function_arn for name, function in invoked.items()},
            role=role,
            tracing_enabled=True,
            logs=stepfunctions.LogOptions(
                destination=logs.LogGroup(
                    self,
                    "Logs",
                    log_group_name=f"/aws/vendedlogs/states/{state_machine_name(settings.stage)}",
                    retention=retention(settings.log_retention_days),
                    removal_policy=cdk.RemovalPolicy.DESTROY,
                ),
                level=stepfunctions.LogLevel.ALL,
                # Execution data holds task tokens, and whoever has one decides.
                include_execution_data=False,
            ),
        )
        acknowledge(
            role,
            "Delivery of state machine logs and X-Ray segments know no resource-level permissions.",
            "IAM5[Resource::*]",
        )


def state_machine_name(stage: str) -> str:
    """Fixed, so that functions can be told the ARN before the state machine, which needs them, exists."""
    return f"truestep-{stage}-recovery"


def state_machine_arn(stack: cdk.Stack, stage: str) -> str:
    """ARN of the state machine, without depending on it."""
    return stack.format_arn(
        service="states",
        resource="stateMachine",
        resource_name=state_machine_name(stage),
        arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
    )


def read_definition() -> str:
    """Text of the definition. Raises PreparationError where the file is missing."""
    try:
        return DEFINITION.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PreparationError(
            f"{DEFINITION.relative_to(REPOSITORY)} is missing; it defines the order of the functions"
        ) from error


def _invoked(definition: str, functions: Functions) -> Mapping[str, lambda_.Function]:
    known = {spec.substitution: functions.by_folder[spec.folder] for spec in WORKFLOW_FUNCTIONS}
    used = sorted(set(_SUBSTITUTION.findall(definition)))
    if unknown := [name for name in used if name not in known]:
        raise PreparationError(
            f"{_NAME} refers to ${{{unknown[0]}}}, but no function of infra/catalogue.py has it; "
            f"known are {', '.join(sorted(known))}"
        )
    return {name: known[name] for name in used}
