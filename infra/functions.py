"""The functions: one asset, one layer, and for each its own role, log group and environment."""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.asset import code_asset, layer_asset
from infra.catalogue import FUNCTIONS, Access, FunctionSpec
from infra.configuration import DeploymentSettings
from infra.environment import service_variables
from infra.network import Network
from infra.permissions import Resources, checkpoint_object_arns, executions_of, statements
from lambdas import settings as names


class Functions(Construct):
    """Every function of the catalogue. ``by_folder`` maps ``open_incident`` to its function."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: DeploymentSettings,
        resources: Resources,
        values: Mapping[str, str],
        network: Network | None,
    ) -> None:
        """values: environment variable -> value, for all variables of ``lambdas.settings``. network: where functions
        that call Kubernetes run; None: outside any VPC."""
        super().__init__(scope, construct_id)
        self._settings = settings
        self._resources = resources
        self._values = values
        self._network = network
        self._code = code_asset()
        self._layer = lambda_.LayerVersion(
            self,
            "Dependencies",
            code=layer_asset(),
            compatible_runtimes=[lambda_.Runtime.PYTHON_3_13],
            compatible_architectures=[lambda_.Architecture.ARM_64],
            description="What truestep's functions import, at the versions of lambdas/requirements.txt",
        )
        self.by_folder: Mapping[str, lambda_.Function] = {spec.folder: self._function(spec) for spec in FUNCTIONS}

    def roles_with(self, access: Access) -> list[iam.IRole]:
        """Roles of the functions that have the capability."""
        return [self.role(spec.folder) for spec in FUNCTIONS if access in spec.access]

    def role(self, folder: str) -> iam.IRole:
        """Role of the function in this folder."""
        role = self.by_folder[folder].role
        assert role is not None
        return role

    def _function(self, spec: FunctionSpec) -> lambda_.Function:
        name = function_name(self._settings.stage, spec.folder)
        log_group = logs.LogGroup(
            self,
            f"{spec.construct_id}Logs",
            log_group_name=f"/truestep/{self._settings.stage}/{spec.folder}",
            retention=retention(self._settings.log_retention_days),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        function = lambda_.Function(
            self,
            spec.construct_id,
            function_name=name,
            runtime=lambda_.Runtime.PYTHON_3_13,
            architecture=lambda_.Architecture.ARM_64,
            handler=spec.handler,
            code=self._code,
            layers=[self._layer],
            timeout=cdk.Duration.seconds(spec.timeout_seconds),
            memory_size=spec.memory_mib,
            tracing=lambda_.Tracing.ACTIVE,
            role=self._role(spec, log_group),
            log_group=log_group,
            logging_format=lambda_.LoggingFormat.JSON,
            application_log_level_v2=lambda_.ApplicationLogLevel[self._settings.log_level.replace("WARNING", "WARN")],
            environment=self._environment(spec.folder),
        )
        if self._network and Access.KUBERNETES in spec.access:
            self._network.attach(function)
        acknowledge(
            function,
            "Python 3.13 is what the pinned wheels are built for; the runtime is raised together with them.",
            "L1",
        )
        return function

    def _role(self, spec: FunctionSpec, log_group: logs.LogGroup) -> iam.Role:
        role = iam.Role(
            self,
            f"{spec.construct_id}Role",
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
            description=f"truestep {self._settings.stage}: {spec.folder}",
        )
        write_logs = iam.PolicyStatement(
            actions=["logs:CreateLogStream", "logs:PutLogEvents"], resources=[log_group.log_group_arn]
        )
        in_network = self._network is not None and Access.KUBERNETES in spec.access
        for statement in [
            write_logs,
            *statements(spec.access, self._resources),
            *(_interfaces(self._function_arn(spec)) if in_network else []),
        ]:
            role.add_to_policy(statement)
        _acknowledge_wildcards(role, spec, self._resources)
        return role

    def _function_arn(self, spec: FunctionSpec) -> str:
        """By its name: the function itself depends on the role that this is written into."""
        return cdk.Stack.of(self).format_arn(
            service="lambda",
            resource="function",
            resource_name=function_name(self._settings.stage, spec.folder),
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )

    def _environment(self, folder: str) -> dict[str, str]:
        own = {name: self._values[name] for name in names.FUNCTION_VARIABLES[folder]}
        return service_variables(self._settings, folder) | own


def function_name(stage: str, folder: str) -> str:
    """``truestep-prod-open-incident``."""
    return f"truestep-{stage}-{folder.replace('_', '-')}"


def retention(days: int) -> logs.RetentionDays:
    """CDK's name for a retention that CloudWatch Logs accepts."""
    by_days = {
        1: "ONE_DAY", 3: "THREE_DAYS", 5: "FIVE_DAYS", 7: "ONE_WEEK", 14: "TWO_WEEKS", 30: "ONE_MONTH",
        60: "TWO_MONTHS", 90: "THREE_MONTHS", 120: "FOUR_MONTHS", 150: "FIVE_MONTHS", 180: "SIX_MONTHS",
        365: "ONE_YEAR", 400: "THIRTEEN_MONTHS", 545: "EIGHTEEN_MONTHS", 731: "TWO_YEARS", 1827: "FIVE_YEARS",
        3653: "TEN_YEARS",
    }  # fmt: skip
    return logs.RetentionDays[by_days[days]]


def _interfaces(function_arn: str) -> list[iam.PolicyStatement]:
    # Lambda makes the interfaces with the function's role, and EC2 knows no narrower resource for it. The denial keeps
    # the function's own code from them (Lambda developer guide, "Giving Lambda functions access to a VPC").
    names = ["CreateNetworkInterface", "DescribeNetworkInterfaces", "DescribeSubnets", "DeleteNetworkInterface"]
    actions = [f"ec2:{name}" for name in names]
    by_its_code = {"ArnEquals": {"lambda:SourceFunctionArn": function_arn}}
    return [
        iam.PolicyStatement(actions=actions, resources=["*"]),
        iam.PolicyStatement(effect=iam.Effect.DENY, actions=actions, resources=["*"], conditions=by_its_code),
    ]


def _acknowledge_wildcards(role: iam.Role, spec: FunctionSpec, resources: Resources) -> None:
    acknowledge(
        role,
        "X-Ray, reading CloudWatch metrics and Lambda's network interfaces know no resource-level permissions.",
        "IAM5[Resource::*]",
    )
    if spec.access & {Access.EVIDENCE_WRITE, Access.EVIDENCE_READ}:
        acknowledge(
            role,
            "Objects are named by incident, under one prefix of the stack's own bucket.",
            f"IAM5[Resource::<{resources.evidence_bucket_logical_id}.Arn>/incidents/*]",
        )
    reason = "Executions have names that are not known before they start; they are this stack's own."
    here = "arn:<AWS::Partition>:states:<AWS::Region>:<AWS::AccountId>:execution"
    seen = {
        Access.SEE_RECOVERIES: resources.state_machine_arn,
        Access.SEE_DECISIONS: resources.approve_state_machine_arn,
    }
    for machine_arn in (arn for access, arn in seen.items() if access in spec.access):
        acknowledge(role, reason, f"IAM5[Resource::{here}:{executions_of(machine_arn).split(':', 6)[6]}]")
    reason = "Checkpoints have one folder a step under the configured prefix."
    for arn in checkpoint_object_arns(resources.clusters):
        if Access.CHECKPOINT_READ in spec.access:
            acknowledge(role, reason, f"IAM5[Resource::{arn}]")
        if Access.CHECKPOINT_REVOKE in spec.access:
            acknowledge(role, reason, f"IAM5[Resource::{arn}/revoked.json]")
