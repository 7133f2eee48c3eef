"""The stack: composes the constructs and tells each only what it needs of the others."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from infra.access import ClusterAccess, TrainingPolicy, training_policy_output
from infra.approval_api import ApprovalApi
from infra.catalogue import Access
from infra.configuration import DeploymentSettings
from infra.environment import check_size, clusters_document, policy_document
from infra.functions import Functions
from infra.intake import EventBus, Intake
from infra.monitoring import Monitoring, Watched
from infra.network import Network
from infra.permissions import Resources
from infra.storage import Announcements, Storage
from infra.workflow import APPROVE, RECOVERY, Workflow, state_machine_arn
from lambdas import settings as names


class RecoveryStack(cdk.Stack):
    """Everything that turns an alarm into a verified resume, once per account and region and stage.

    Depends on no concrete account or region, and looks nothing up. Raises ConfigurationError where there are more
    clusters than the functions' environment holds.
    """

    def __init__(self, scope: Construct, construct_id: str, *, settings: DeploymentSettings) -> None:
        super().__init__(
            scope,
            construct_id,
            stack_name=f"truestep-{settings.stage}",
            description="truestep: recovery of PyTorch training from GPUs that corrupt data silently",
            termination_protection=settings.deletion_protection,
        )
        check_size(settings)
        self._settings = settings
        self._storage = Storage(self, "Storage", settings=settings)
        self._announcements = Announcements(self, "Announcements", settings=settings, data_key=self._storage.data_key)
        self._bus = EventBus(self, "Events", settings=settings).bus
        self._api = ApprovalApi(self, "Approval", settings=settings)
        self._functions = Functions(
            self,
            "Functions",
            settings=settings,
            resources=self._resources(),
            values=self._values(),
            network=self._network(),
        )
        self._workflow = Workflow(self, "Workflow", settings=settings, functions=self._functions)
        self._connect()
        self._tell()

    def _resources(self) -> Resources:
        bucket = self._storage.evidence_bucket.node.default_child
        assert isinstance(bucket, cdk.CfnElement)
        return Resources(
            table_arn=self._storage.table.table_arn,
            evidence_bucket_arn=self._storage.evidence_bucket.bucket_arn,
            evidence_bucket_logical_id=self.get_logical_id(bucket),
            data_key_arn=self._storage.data_key.key_arn,
            topic_arn=self._announcements.topic.topic_arn,
            topic_key_arn=self._announcements.key_arn,
            hmac_key_arn=self._storage.signing_key.key_arn,
            decision_key_arn=self._storage.decision_key.key_arn,
            console_key_arn=self._storage.console_key.key_arn,
            state_machine_arn=state_machine_arn(self, self._settings.stage, RECOVERY),
            approve_state_machine_arn=state_machine_arn(self, self._settings.stage, APPROVE),
            clusters=self._settings.clusters,
        )

    def _network(self) -> Network | None:
        network = self._settings.network
        if network is None:
            return None
        return Network(self, "Network", settings=self._settings, network=network, region=self.region)

    def _values(self) -> dict[str, str]:
        return {
            names.TABLE: self._storage.table.table_name,
            names.EVIDENCE_BUCKET: self._storage.evidence_bucket.bucket_name,
            names.TOPIC_ARN: self._announcements.topic.topic_arn,
            names.HMAC_KEY_ID: self._storage.signing_key.key_id,
            names.DECISION_KEY_ID: self._storage.decision_key.key_id,
            names.CONSOLE_KEY_ID: self._storage.console_key.key_id,
            names.APPROVAL_URL: self._api.url,
            names.STATE_MACHINE_ARN: state_machine_arn(self, self._settings.stage, RECOVERY),
            names.APPROVE_STATE_MACHINE_ARN: state_machine_arn(self, self._settings.stage, APPROVE),
            names.CLUSTERS: clusters_document(self._settings),
            names.POLICY: policy_document(self._settings),
        }

    def _connect(self) -> None:
        functions = self._functions.by_folder
        intake = Intake(
            self,
            "Intake",
            bus=self._bus,
            receive_alarm=functions["receive_alarm"],
            record_training_event=functions["record_training_event"],
            notice_end=functions["notice_end"],
            recovery_arn=self._workflow.recovery.state_machine_arn,
        )
        self._api.add_routes(functions["decide_approval"], functions["show_console"])
        console = self._functions.roles_with(Access.CONSOLE_LINK)
        self._storage.reserve_signing(self._storage.console_key, signers=console, verifiers=console)
        self._storage.reserve_signing(
            self._storage.signing_key,
            signers=self._functions.roles_with(Access.SIGN),
            verifiers=self._functions.roles_with(Access.VERIFY_SIGNATURE),
        )
        self._storage.reserve_signing(
            self._storage.decision_key,
            signers=self._functions.roles_with(Access.SIGN_DECISION),
            verifiers=self._functions.roles_with(Access.VERIFY_DECISION),
        )
        ClusterAccess(self, "ClusterAccess", settings=self._settings, functions=self._functions)
        self._add_training_policies()
        watched = Watched(
            topic=self._announcements.topic,
            dead_letters=intake.dead_letters,
            state_machine=self._workflow.recovery,
            functions=functions,
        )
        Monitoring(self, "Monitoring", settings=self._settings, watched=watched)

    def _add_training_policies(self) -> None:
        for cluster in self._settings.clusters:
            for name in cluster.training_namespaces:
                construct_id = f"Training-{cluster.cluster_id}-{name}"
                training = TrainingPolicy(self, construct_id, cluster=cluster, namespace=name, bus=self._bus)
                cdk.CfnOutput(
                    self,
                    training_policy_output(cluster, name),
                    value=training.policy.managed_policy_arn,
                    description=f"For training pods in namespace {name} of {cluster.hyperpod_cluster_name}",
                )

    def _tell(self) -> None:
        outputs = {
            "EventBusName": (self._bus.event_bus_name, "TRUESTEP_EVENT_BUS of training pods in this account"),
            "EventBusArn": (self._bus.event_bus_arn, "TRUESTEP_EVENT_BUS of training pods in other accounts"),
            "TableName": (self._storage.table.table_name, "Incidents, claims and checkpoints"),
            "StateMachineArn": (self._workflow.recovery.state_machine_arn, "The recovery"),
            "ApproveStateMachineArn": (
                self._workflow.approve.state_machine_arn,
                "Started in the console by whoever decides there",
            ),
            "ApprovalUrl": (self._api.url, "Base URL of the approval links"),
            "TopicArn": (self._announcements.topic.topic_arn, "Subscribe people here"),
            "EvidenceBucketName": (self._storage.evidence_bucket.bucket_name, "Evidence and reports of incidents"),
            "ClusterArns": (
                ",".join(cluster.hyperpod_cluster_arn for cluster in self._settings.clusters),
                "HyperPod clusters that this deployment serves",
            ),
            "TrainingSources": (
                ",".join(source for cluster in self._settings.clusters for source in cluster.event_sources),
                "Event sources of the training pods that this deployment serves",
            ),
            "DecideFunction": (
                self._functions.by_folder["decide_approval"].function_name,
                "Invoked by truestep incidents",
            ),
            "ConsoleFunction": (
                self._functions.by_folder["show_console"].function_name,
                "Invoked by truestep incidents console",
            ),
            "CheckAccessFunction": (
                self._functions.by_folder["check_access"].function_name,
                "Invoked by truestep check-access",
            ),
        }
        if self._api.domain_target:
            target = self._api.domain_target
            outputs["ApprovalDomainTarget"] = (target, "Point the DNS record of approval_domain here (CNAME)")
        else:
            outputs["ApprovalApiUrl"] = (self._api.api.api_endpoint, "The API's own address, for a front of yours")
        for name, (value, description) in outputs.items():
            cdk.CfnOutput(self, name, value=value, description=description)
