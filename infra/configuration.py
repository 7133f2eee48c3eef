"""Settings of a deployment: read from the CDK context, checked before a construct is made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from infra.errors import ConfigurationError
from infra.shapes import (
    AccountId,
    AmpArn,
    BusName,
    CertificateArn,
    CheckpointLocation,
    DomainName,
    EksName,
    Email,
    HyperPodArn,
    HyperPodName,
    KeyArn,
    Namespace,
    QueryUrl,
    SecurityGroupId,
    Stage,
    SubnetId,
    TopicArn,
    VpcId,
)
from lambdas.domain.errors import SettingsError
from lambdas.domain.policy import policies_from_json
from truestep.contract import training_source

CONTEXT_KEY = "truestep"

InterfaceEndpoint = Literal[
    "eks", "sts", "sagemaker.api", "states", "sns", "kms", "logs", "monitoring", "xray", "aps-workspaces", "events"
]
"""Services that functions in a VPC call, and that have no gateway endpoint (DynamoDB and S3 have one)."""

_AMP_URL = re.compile(r"https://aps-workspaces\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/workspaces/(ws-[A-Za-z0-9-]+)/?")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ClusterSettings(_Settings):
    """One HyperPod cluster (EKS orchestrator) whose jobs this deployment recovers."""

    hyperpod_cluster_arn: HyperPodArn
    """``aws sagemaker list-clusters``. Its last part is an id of 12 characters, not the cluster's name."""
    hyperpod_cluster_name: HyperPodName
    """The same list. A name that does not exist: ``truestep check-access`` says so."""
    eks_cluster_name: EksName
    """Last part of ``Orchestrator.Eks.ClusterArn`` in ``aws sagemaker describe-cluster``. A name that does not exist:
    the deployment fails at its access entries."""
    training_namespaces: Annotated[tuple[Namespace, ...], Field(min_length=1)]
    """``kubectl get namespaces``, those with training jobs: only there may the recovery touch jobs, and only for them
    may pods report. One without its roles: ``truestep check-access`` says so; one left out: dead letters that name it.
    """
    checkpoint_buckets: tuple[CheckpointLocation, ...] = ()
    """``bucket`` or ``bucket/prefix`` of its jobs' checkpoints in S3; none where they are on a file system. A bucket
    that does not exist: ``truestep check-access`` says so."""
    security_group_id: SecurityGroupId | None = None
    """For a private endpoint: ``clusterSecurityGroupId`` of ``aws eks describe-cluster``; the stack lets its own
    functions in on HTTPS. Left out: ``truestep check-access`` says that Kubernetes does not answer."""
    amp_workspace_arn: AmpArn | None = None
    """``aws amp list-workspaces``, the workspace with the cluster's DCGM metrics. None: evidence says "no data"."""
    amp_query_url: QueryUrl | None = None
    """Another Prometheus query API, in place of ``amp_workspace_arn``."""

    @model_validator(mode="after")
    def _namespaces_are_distinct(self) -> Self:
        if repeated := sorted({name for name in self.training_namespaces if self.training_namespaces.count(name) > 1}):
            raise ValueError(f"training_namespaces: {repeated[0]!r} is listed twice; give each namespace once")
        return self

    @model_validator(mode="after")
    def _prometheus_is_named_once(self) -> Self:
        if self.amp_workspace_arn is None or self.amp_query_url is None:
            return self
        url = _AMP_URL.fullmatch(self.amp_query_url)
        if url and not self.amp_workspace_arn.endswith(f"workspace/{url[2]}"):
            raise ValueError("amp_query_url and amp_workspace_arn name different workspaces; give one of them")
        return self

    @property
    def partition(self) -> str:
        """AWS partition, from the cluster's ARN."""
        return self.hyperpod_cluster_arn.split(":")[1]

    @property
    def region(self) -> str:
        """Region, from the cluster's ARN."""
        return self.hyperpod_cluster_arn.split(":")[3]

    @property
    def account_id(self) -> str:
        """Account, from the cluster's ARN."""
        return self.hyperpod_cluster_arn.split(":")[4]

    @property
    def cluster_id(self) -> str:
        """Last part of the cluster's ARN."""
        return self.hyperpod_cluster_arn.rpartition("/")[2]

    @property
    def event_sources(self) -> tuple[str, ...]:
        """The EventBridge sources of its training pods, in the order of their namespaces."""
        return tuple(training_source(self.hyperpod_cluster_arn, name) for name in self.training_namespaces)

    @property
    def eks_cluster_arn(self) -> str:
        """ARN of the orchestrator; HyperPod requires it in the same account and region."""
        return f"arn:{self.partition}:eks:{self.region}:{self.account_id}:cluster/{self.eks_cluster_name}"

    @property
    def query_url(self) -> str | None:
        """Where DCGM series are asked for; None: evidence records "no data"."""
        if self.amp_query_url or not self.amp_workspace_arn:
            return self.amp_query_url
        _, _, _, region, _, resource = self.amp_workspace_arn.split(":")
        return f"https://aps-workspaces.{region}.amazonaws.com/{resource.replace('workspace/', 'workspaces/')}"

    @property
    def workspace_arn(self) -> str | None:
        """ARN that a query permission needs; None where the URL is not a workspace of Managed Prometheus."""
        if self.amp_workspace_arn or not self.amp_query_url:
            return self.amp_workspace_arn
        url = _AMP_URL.fullmatch(self.amp_query_url)
        return f"arn:{self.partition}:aps:{url[1]}:{self.account_id}:workspace/{url[2]}" if url else None


class NetworkSettings(_Settings):
    """Where the functions that call Kubernetes run, if the EKS endpoint is private."""

    subnet_ids: Annotated[tuple[SubnetId, ...], Field(min_length=1)]
    """Subnets that reach the endpoints; two zones are better than one."""
    security_group_ids: tuple[SecurityGroupId, ...] = ()
    """Existing groups of the functions. Left out: the stack makes one in ``vpc_id``, with HTTPS out and nothing in."""
    vpc_id: VpcId | None = None
    """The VPC of the subnets, for a security group or endpoints that the stack makes."""
    interface_endpoints: tuple[InterfaceEndpoint, ...] = ()
    """Services for which the stack makes an interface endpoint in ``vpc_id``, where the subnets have no NAT."""

    @model_validator(mode="after")
    def _groups_and_endpoints_have_a_vpc(self) -> Self:
        if not self.vpc_id and not self.security_group_ids:
            raise ValueError("give security_group_ids, or vpc_id so that the stack makes a group there")
        if self.interface_endpoints and not self.vpc_id:
            raise ValueError("interface_endpoints need vpc_id: an endpoint is made in a VPC")
        return self


class ApprovalDomainSettings(_Settings):
    """A name of your own in the approval links."""

    name: DomainName
    """The host name; its DNS record is yours."""
    certificate_arn: CertificateArn | None = None
    """ACM certificate of the name, in the clusters' region: the stack serves the name, and nothing at the API's own
    address. Left out: a front of yours serves it (CloudFront with a web ACL) and calls ``ApprovalApiUrl``."""


class DeploymentSettings(_Settings):
    """Everything that differs between two deployments."""

    stage: Stage = "prod"
    """Part of every fixed name, so that two stages fit in one account and region."""
    clusters: Annotated[tuple[ClusterSettings, ...], Field(min_length=1)]
    """One entry a cluster; all in one account and region, the stack's. About ten fit in a stage; more are refused."""
    policy: dict[str, Any] = Field(default_factory=dict)
    """What the recovery may do: fields of ``lambdas/domain/policy.py``; ``policy.clusters.<ARN>`` overrides them for
    one cluster. Start with ``{"dry_run": true}``. Left out: the policy's own safe defaults."""
    existing_event_bus_name: BusName | None = None
    """Use this bus of the same account and region; its resource policy stays its owner's."""
    existing_topic_arn: TopicArn | None = None
    """Announce on this topic of yours. Its policy must let ``cloudwatch.amazonaws.com`` publish."""
    existing_topic_key_arn: KeyArn | None = None
    """Key of ``existing_topic_arn``, where it has its own. Its policy must let the functions and
    ``cloudwatch.amazonaws.com`` use it."""
    approver_emails: tuple[Email, ...] = ()
    """Subscribed to the topic; each address confirms once."""
    approval_domain: ApprovalDomainSettings | None = None
    """A name of your own in the approval links. None: the API's own address."""
    training_account_ids: tuple[AccountId, ...] = ()
    """Other accounts whose training pods may put events on the bus."""
    network: NetworkSettings | None = None
    """Where the functions that call Kubernetes run, if an EKS endpoint is private."""
    training_silence_hours: Annotated[int, Field(ge=0, le=24)] = 24
    """Alarm when no job has reported for so long; 0 for a deployment that often trains nothing."""
    log_retention_days: Literal[1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1827, 3653] = 365
    """How long the functions' logs are kept."""
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """What the functions log."""
    deletion_protection: bool = True
    """False only for stages that hold nothing: table, bucket and keys then go with the stack."""

    @model_validator(mode="after")
    def _clusters_are_distinct(self) -> Self:
        for name in ("hyperpod_cluster_arn", "eks_cluster_name"):
            values = [getattr(cluster, name) for cluster in self.clusters]
            if repeated := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"clusters: {name} {repeated[0]!r} is listed twice; give each cluster once")
        if self.existing_topic_key_arn and not self.existing_topic_arn:
            raise ValueError("existing_topic_key_arn is set without existing_topic_arn; set both or neither")
        return self

    @model_validator(mode="after")
    def _own_group_is_let_in(self) -> Self:
        named = [cluster.eks_cluster_name for cluster in self.clusters if cluster.security_group_id]
        if named and (self.network is None or self.network.security_group_ids):
            raise ValueError(
                f"clusters: security_group_id of {named[0]} needs network.vpc_id without network.security_group_ids: "
                "only a group that the stack makes is let in by it"
            )
        return self

    @model_validator(mode="after")
    def _one_account_and_region(self) -> Self:
        places = sorted({(cluster.account_id, cluster.region) for cluster in self.clusters})
        if len(places) > 1:
            raise ValueError(
                "clusters: a deployment serves one account and region, but these are in "
                + " and ".join(f"{account} {region}" for account, region in places)
            )
        return self

    @model_validator(mode="after")
    def _checkpoints_are_apart(self) -> Self:
        """One cluster's pods may write and delete below their locations, and nowhere else."""
        places = [(place, cluster) for cluster in self.clusters for place in cluster.checkpoint_buckets]
        for place, owner in places:
            for other, user in places:
                if owner is not user and f"{other}/".startswith(f"{place}/"):
                    raise ValueError(
                        f"clusters: {other!r} of {user.eks_cluster_name} lies in {place!r} of "
                        f"{owner.eks_cluster_name}, whose pods could delete it; give each cluster a prefix of its own"
                    )
        return self

    @model_validator(mode="after")
    def _topic_can_ring(self) -> Self:
        topic, region = self.existing_topic_arn, self.clusters[0].region
        if topic and topic.split(":")[3] != region:
            raise ValueError(f"existing_topic_arn {topic} is not in {region}, where the stack's alarms ring")
        if topic and topic.endswith(".fifo"):
            raise ValueError(f"existing_topic_arn {topic} is FIFO, which alarms cannot use; give a standard topic")
        return self

    @model_validator(mode="after")
    def _certificate_is_regional(self) -> Self:
        certificate = self.approval_domain.certificate_arn if self.approval_domain else None
        if certificate and certificate.split(":")[3] != self.clusters[0].region:
            raise ValueError(
                f"approval_domain: certificate_arn is in {certificate.split(':')[3]}, but an API needs one of its own "
                f"region, {self.clusters[0].region}"
            )
        return self

    @model_validator(mode="after")
    def _policy_is_one(self) -> Self:
        try:
            _, overrides = policies_from_json(self.policy)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        if unknown := sorted(set(overrides) - {cluster.hyperpod_cluster_arn for cluster in self.clusters}):
            raise ValueError(f"policy: overrides {unknown[0]}, which is not among the clusters")
        return self


def parse_settings(context: Mapping[str, Any]) -> DeploymentSettings:
    """Settings of the CDK context, from its key ``truestep``.

    Raises ConfigurationError that names every wrong setting by its path: ``truestep.clusters[0].eks_cluster_name``.
    """
    if CONTEXT_KEY not in context:
        raise ConfigurationError(f"the context has no {CONTEXT_KEY!r}; see cdk.json for an example")
    section = context[CONTEXT_KEY]
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{CONTEXT_KEY}: expected an object of settings, got {type(section).__name__}")
    try:
        return DeploymentSettings.model_validate_json(_json(section))
    except ValidationError as error:
        found = error.errors(include_url=False)
        # What is wrong inside a list also empties the list, which is no second mistake.
        inside = {item["loc"][:end] for item in found for end in range(len(item["loc"]))}
        shown = [item for item in found if item["type"] != "too_short" or item["loc"] not in inside]
        lines = "\n".join(f"  {_path(item['loc'])}: {_message(item)}" for item in shown)
        raise ConfigurationError(f"wrong settings in the context:\n{lines}") from error


def check_destination(settings: DeploymentSettings, environ: Mapping[str, str]) -> None:
    """Refuse to deploy where the clusters are not. environ: has what the CDK command line says of the sign-in, if it
    runs us.

    Raises ConfigurationError.
    """
    cluster = settings.clusters[0]
    account = environ.get("CDK_DEFAULT_ACCOUNT", cluster.account_id)
    region = environ.get("CDK_DEFAULT_REGION", cluster.region)
    if (account, region) != (cluster.account_id, cluster.region):
        raise ConfigurationError(
            f"you are signed in to account {account}, region {region}, but the clusters are in {cluster.account_id}, "
            f"{cluster.region}: sign in there, or correct {CONTEXT_KEY}.clusters"
        )


def _json(section: Mapping[str, Any]) -> str:
    # Through JSON, because strict validation takes lists for tuples only there.
    try:
        return json.dumps(section)
    except TypeError as error:
        raise ConfigurationError(f"{CONTEXT_KEY}: settings must be plain JSON: {error}") from error


def _path(location: tuple[int | str, ...]) -> str:
    return CONTEXT_KEY + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _message(item: Any) -> str:
    if item["type"] == "missing":
        return "missing; it has no default"
    if item["type"] == "extra_forbidden":
        return "no such setting; check the spelling"
    if item["type"] == "too_short":
        return "empty; give at least one"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if item["type"] == "value_error" else f"{message} (got {item['input']!r})"
