"""What the recovery remembers, and the keys that protect it."""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.configuration import DeploymentSettings
from lambdas import settings as names


class Storage(Construct):
    """Table, evidence bucket, and the keys: one encrypts data at rest, the others sign links and decisions."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: DeploymentSettings) -> None:
        super().__init__(scope, construct_id)
        removal = cdk.RemovalPolicy.RETAIN if settings.deletion_protection else cdk.RemovalPolicy.DESTROY
        self.data_key = kms.Key(
            self,
            "DataKey",
            description="truestep: evidence and notifications at rest",
            enable_key_rotation=True,
            removal_policy=removal,
        )
        self.signing_key = self._hmac_key("SigningKey", "signatures of approval links", removal)
        # A key of its own: the functions that sign links must not be able to sign what comes of them.
        self.decision_key = self._hmac_key("DecisionKey", "signatures of people's decisions", removal)
        self.console_key = self._hmac_key("ConsoleKey", "signatures of links of the console", removal)
        self.table = dynamodb.Table(
            self,
            "Table",
            partition_key=dynamodb.Attribute(name="PK", type=dynamodb.AttributeType.STRING),
            sort_key=dynamodb.Attribute(name="SK", type=dynamodb.AttributeType.STRING),
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            encryption=dynamodb.TableEncryption.AWS_MANAGED,
            point_in_time_recovery_specification=dynamodb.PointInTimeRecoverySpecification(
                point_in_time_recovery_enabled=True
            ),
            deletion_protection=settings.deletion_protection,
            removal_policy=removal,
        )
        self.table.add_global_secondary_index(
            index_name=names.LISTING_INDEX,
            partition_key=dynamodb.Attribute(name=names.LISTED, type=dynamodb.AttributeType.STRING),
            sort_key=dynamodb.Attribute(name=names.LISTED_AT, type=dynamodb.AttributeType.STRING),
            projection_type=dynamodb.ProjectionType.INCLUDE,
            non_key_attributes=["status", "job_key"],
        )
        self.evidence_bucket = s3.Bucket(
            self,
            "EvidenceBucket",
            versioned=True,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="OldVersionsAndBrokenUploads",
                    noncurrent_version_expiration=cdk.Duration.days(90),
                    abort_incomplete_multipart_upload_after=cdk.Duration.days(7),
                )
            ],
            encryption=s3.BucketEncryption.KMS,
            encryption_key=self.data_key,
            bucket_key_enabled=True,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=removal,
        )
        acknowledge(
            self.evidence_bucket,
            "Written and read by three functions whose calls CloudTrail data events record with the caller's role, "
            "which server access logs would not.",
            "S1",
        )

    def _hmac_key(self, construct_id: str, purpose: str, removal: cdk.RemovalPolicy) -> kms.Key:
        return kms.Key(
            self,
            construct_id,
            description=f"truestep: {purpose}",
            key_spec=kms.KeySpec.HMAC_256,
            key_usage=kms.KeyUsage.GENERATE_VERIFY_MAC,
            removal_policy=removal,
        )

    @staticmethod
    def reserve_signing(key: kms.Key, *, signers: Sequence[iam.IRole], verifiers: Sequence[iam.IRole]) -> None:
        """Let nobody else use the key, whatever IAM grants them: who signs a link decides, or sees everything."""
        for action, roles in (("kms:GenerateMac", signers), ("kms:VerifyMac", verifiers)):
            key.add_to_resource_policy(
                iam.PolicyStatement(
                    effect=iam.Effect.DENY,
                    principals=[iam.AnyPrincipal()],
                    actions=[action],
                    resources=["*"],
                    conditions={"ArnNotEquals": {"aws:PrincipalArn": [role.role_arn for role in roles]}},
                )
            )


class Announcements(Construct):
    """The topic that people subscribe to: made here, or an existing one."""

    def __init__(
        self, scope: Construct, construct_id: str, *, settings: DeploymentSettings, data_key: kms.IKey
    ) -> None:
        super().__init__(scope, construct_id)
        self.topic: sns.ITopic
        self.key_arn: str | None
        if settings.existing_topic_arn:
            self.topic = sns.Topic.from_topic_arn(self, "Topic", settings.existing_topic_arn)
            self.key_arn = settings.existing_topic_key_arn
        else:
            self.topic = sns.Topic(
                self, "Topic", display_name="truestep: GPU corruption", master_key=data_key, enforce_ssl=True
            )
            self.key_arn = data_key.key_arn
            # A topic with a policy of its own has no default one any more, which would have let alarms publish.
            self.topic.add_to_resource_policy(
                iam.PolicyStatement(
                    sid="AlarmsOfThisStage",
                    principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                    actions=["sns:Publish"],
                    resources=[self.topic.topic_arn],
                    conditions={
                        "StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID},
                        "ArnLike": {"aws:SourceArn": _alarms_of(cdk.Stack.of(self), settings.stage)},
                    },
                )
            )
            # CloudWatch publishes alarms as a service, so the key itself has to let it.
            data_key.add_to_resource_policy(
                iam.PolicyStatement(
                    principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                    actions=["kms:Decrypt", "kms:GenerateDataKey*"],
                    resources=["*"],
                    conditions={"StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}},
                )
            )
        for address in settings.approver_emails:
            self.topic.add_subscription(subscriptions.EmailSubscription(address))


def _alarms_of(stack: cdk.Stack, stage: str) -> str:
    return stack.format_arn(
        service="cloudwatch",
        resource="alarm",
        resource_name=f"truestep-{stage}-*",
        arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
    )
