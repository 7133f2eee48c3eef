"""Who may reach what outside the stack: functions the clusters, training pods the bus and the checkpoints."""

from __future__ import annotations

from aws_cdk import aws_eks as eks
from aws_cdk import aws_events as events
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.catalogue import FUNCTIONS
from infra.configuration import ClusterSettings, DeploymentSettings
from infra.functions import Functions
from infra.permissions import checkpoint_object_arns, checkpoint_statements
from truestep.contract import training_source


class ClusterAccess(Construct):
    """Access entries: the roles of the functions that call Kubernetes, each in its own groups, on every cluster."""

    def __init__(
        self, scope: Construct, construct_id: str, *, settings: DeploymentSettings, functions: Functions
    ) -> None:
        super().__init__(scope, construct_id)
        for index, cluster in enumerate(settings.clusters):
            for spec in FUNCTIONS:
                if spec.groups:
                    eks.CfnAccessEntry(
                        self,
                        f"{spec.construct_id}{index}",
                        cluster_name=cluster.eks_cluster_name,
                        principal_arn=functions.role(spec.folder).role_arn,
                        kubernetes_groups=sorted(spec.groups),
                        type="STANDARD",
                    )


class TrainingPolicy(Construct):
    """Managed policy for the training pods of one namespace: events on this bus in its own name, and the cluster's
    checkpoints."""

    def __init__(
        self, scope: Construct, construct_id: str, *, cluster: ClusterSettings, namespace: str, bus: events.IEventBus
    ) -> None:
        super().__init__(scope, construct_id)
        source = training_source(cluster.hyperpod_cluster_arn, namespace)
        put_events = iam.PolicyStatement(
            sid="ReportToRecovery",
            actions=["events:PutEvents"],
            resources=[bus.event_bus_arn],
            conditions={"StringEquals": {"events:source": source}},
        )
        objects = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        checkpoints = list(checkpoint_statements((cluster,), object_actions=objects))
        self.policy = iam.ManagedPolicy(
            self,
            "Policy",
            description=f"truestep: what a training pod in namespace {namespace} of {cluster.hyperpod_cluster_name} "
            "needs to report and to keep verified checkpoints",
            statements=[put_events, *checkpoints, *_keep_revocations(cluster)],
        )
        acknowledge(
            self.policy,
            "Checkpoints have one folder a step under the configured prefix.",
            *(f"IAM5[Resource::{arn}]" for arn in checkpoint_object_arns((cluster,))),
        )


def training_policy_output(cluster: ClusterSettings, namespace: str) -> str:
    """Name of the output that has the policy's ARN. Outputs have letters and digits only, so a dash is written X."""
    return f"TrainingPolicyArn{cluster.cluster_id.capitalize()}{namespace.capitalize().replace('-', 'X')}"


def _keep_revocations(cluster: ClusterSettings) -> list[iam.PolicyStatement]:
    arns = [f"{arn}/revoked.json" for arn in checkpoint_object_arns((cluster,))]
    if not arns:
        return []
    actions = ["s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion"]
    return [iam.PolicyStatement(sid="RevocationsArePermanent", effect=iam.Effect.DENY, actions=actions, resources=arns)]
