"""Capabilities of the catalogue as IAM statements on named resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from aws_cdk import aws_iam as iam

from infra.catalogue import Access
from infra.configuration import ClusterSettings
from lambdas.settings import LISTING_INDEX

_WITH_SHA_256 = {"StringEquals": {"kms:MacAlgorithm": "HMAC_SHA_256"}}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """ARNs (tokens included) that statements name."""

    table_arn: str
    evidence_bucket_arn: str
    evidence_bucket_logical_id: str
    data_key_arn: str
    topic_arn: str
    topic_key_arn: str | None
    hmac_key_arn: str
    decision_key_arn: str
    console_key_arn: str
    state_machine_arn: str
    approve_state_machine_arn: str
    clusters: tuple[ClusterSettings, ...]


def statements(access: frozenset[Access], resources: Resources) -> list[iam.PolicyStatement]:
    """Statements of all capabilities, in the order in which ``Access`` lists them."""
    return [statement for item in Access if item in access for statement in _STATEMENTS[item](resources)]


def _allow(actions: list[str], *arns: str, conditions: Mapping[str, object] | None = None) -> iam.PolicyStatement:
    return iam.PolicyStatement(actions=actions, resources=list(arns), conditions=conditions)


def _table(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["dynamodb:GetItem", "dynamodb:PutItem"], resources.table_arn)


def _table_read(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["dynamodb:GetItem"], resources.table_arn)


def _table_update(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["dynamodb:UpdateItem"], resources.table_arn)


def _table_release(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["dynamodb:DeleteItem", "dynamodb:UpdateItem"], resources.table_arn)


def _history(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["dynamodb:Query"], resources.table_arn)


def _listing_index(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["dynamodb:Query"], f"{resources.table_arn}/index/{LISTING_INDEX}")


def _start_recovery(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["states:StartExecution"], resources.state_machine_arn)


def executions_of(state_machine_arn: str) -> str:
    """ARN pattern of all executions of the state machine."""
    return f"{state_machine_arn.replace(':stateMachine:', ':execution:', 1)}:*"


def _see(machine: Callable[[Resources], str]) -> Callable[[Resources], Iterator[iam.PolicyStatement]]:
    def statement(resources: Resources) -> Iterator[iam.PolicyStatement]:
        yield _allow(["states:DescribeExecution"], executions_of(machine(resources)))

    return statement


def _list_recoveries(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["states:ListExecutions"], resources.state_machine_arn)


def _answer_token(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["states:SendTaskSuccess"], resources.state_machine_arn)


def _announce(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["sns:Publish"], resources.topic_arn)
    if resources.topic_key_arn:
        yield _allow(["kms:Decrypt", "kms:GenerateDataKey"], resources.topic_key_arn)


def _mac(action: str, key_arn: Callable[[Resources], str]) -> Callable[[Resources], Iterator[iam.PolicyStatement]]:
    def statement(resources: Resources) -> Iterator[iam.PolicyStatement]:
        yield _allow([action], key_arn(resources), conditions=_WITH_SHA_256)

    return statement


def _console_link(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["kms:GenerateMac", "kms:VerifyMac"], resources.console_key_arn, conditions=_WITH_SHA_256)


def _evidence_write(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["s3:PutObject"], f"{resources.evidence_bucket_arn}/incidents/*")
    # Objects are put whole: only a multipart upload would decrypt the parts it has written.
    yield _allow(["kms:GenerateDataKey"], resources.data_key_arn)


def _evidence_read(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["s3:GetObject"], f"{resources.evidence_bucket_arn}/incidents/*")
    yield _allow(["kms:Decrypt"], resources.data_key_arn)


def _kubernetes(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield _allow(["eks:DescribeCluster"], *(cluster.eks_cluster_arn for cluster in resources.clusters))


def _hyperpod(*actions: str) -> Callable[[Resources], Iterator[iam.PolicyStatement]]:
    def statement(resources: Resources) -> Iterator[iam.PolicyStatement]:
        names = [f"sagemaker:{action}" for action in actions]
        yield _allow(names, *(cluster.hyperpod_cluster_arn for cluster in resources.clusters))

    return statement


def _metrics_read(resources: Resources) -> Iterator[iam.PolicyStatement]:
    workspaces = sorted({cluster.workspace_arn for cluster in resources.clusters if cluster.workspace_arn})
    if workspaces:
        yield _allow(["aps:QueryMetrics"], *workspaces)
    # CloudWatch knows no resource-level permission for reading metrics.
    yield _allow(["cloudwatch:GetMetricData"], "*")


def _checkpoint_read(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield from checkpoint_statements(resources.clusters, object_actions=["s3:GetObject"])


def _checkpoint_list(resources: Resources) -> Iterator[iam.PolicyStatement]:
    yield from _listing(resources.clusters)


def _checkpoint_revoke(resources: Resources) -> Iterator[iam.PolicyStatement]:
    if arns := [f"{arn}/revoked.json" for arn in checkpoint_object_arns(resources.clusters)]:
        yield _allow(["s3:PutObject"], *arns)


def checkpoint_statements(
    clusters: tuple[ClusterSettings, ...], *, object_actions: list[str]
) -> Iterator[iam.PolicyStatement]:
    """Statements for the checkpoints in S3: ``object_actions`` under each prefix, and listing of nothing else.

    Yields none where no cluster names a bucket (checkpoints then live on a file system).
    """
    if arns := checkpoint_object_arns(clusters):
        yield _allow(object_actions, *arns)
    yield from _listing(clusters)


def _listing(clusters: tuple[ClusterSettings, ...]) -> Iterator[iam.PolicyStatement]:
    for location in checkpoint_locations(clusters):
        bucket, _, prefix = location.partition("/")
        condition = {"StringLike": {"s3:prefix": [prefix, f"{prefix}/*"]}} if prefix else None
        yield _allow(["s3:ListBucket"], f"arn:{clusters[0].partition}:s3:::{bucket}", conditions=condition)


def checkpoint_locations(clusters: tuple[ClusterSettings, ...]) -> list[str]:
    """Configured ``bucket`` or ``bucket/prefix`` of all clusters, each once, sorted."""
    return sorted({location for cluster in clusters for location in cluster.checkpoint_buckets})


def checkpoint_object_arns(clusters: tuple[ClusterSettings, ...]) -> list[str]:
    """ARN pattern of all objects under each location."""
    return [f"arn:{clusters[0].partition}:s3:::{location}/*" for location in checkpoint_locations(clusters)]


_STATEMENTS: Mapping[Access, Callable[[Resources], Iterator[iam.PolicyStatement]]] = {
    Access.TABLE: _table,
    Access.TABLE_READ: _table_read,
    Access.TABLE_UPDATE: _table_update,
    Access.TABLE_RELEASE: _table_release,
    Access.HISTORY: _history,
    Access.LISTING: _listing_index,
    Access.START_RECOVERY: _start_recovery,
    Access.SEE_RECOVERIES: _see(attrgetter("state_machine_arn")),
    Access.LIST_RECOVERIES: _list_recoveries,
    Access.SEE_DECISIONS: _see(attrgetter("approve_state_machine_arn")),
    Access.ANSWER_TOKEN: _answer_token,
    Access.ANNOUNCE: _announce,
    Access.SIGN: _mac("kms:GenerateMac", attrgetter("hmac_key_arn")),
    Access.VERIFY_SIGNATURE: _mac("kms:VerifyMac", attrgetter("hmac_key_arn")),
    Access.SIGN_DECISION: _mac("kms:GenerateMac", attrgetter("decision_key_arn")),
    Access.VERIFY_DECISION: _mac("kms:VerifyMac", attrgetter("decision_key_arn")),
    Access.CONSOLE_LINK: _console_link,
    Access.EVIDENCE_WRITE: _evidence_write,
    Access.EVIDENCE_READ: _evidence_read,
    Access.KUBERNETES: _kubernetes,
    Access.HYPERPOD_LIST: _hyperpod("ListClusterNodes"),
    Access.HYPERPOD_NODE: _hyperpod("DescribeClusterNode"),
    Access.HYPERPOD_CHECK: _hyperpod("DescribeCluster", "StartClusterHealthCheck"),
    Access.HYPERPOD_REPLACE: _hyperpod("BatchReplaceClusterNodes"),
    Access.METRICS_READ: _metrics_read,
    Access.CHECKPOINT_READ: _checkpoint_read,
    Access.CHECKPOINT_LIST: _checkpoint_list,
    Access.CHECKPOINT_REVOKE: _checkpoint_revoke,
}
