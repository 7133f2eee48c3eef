"""The parts of an incident's record: what each state of the workflow writes down. Frozen, plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from truestep.contract import CheckpointRef, DeviceReport, Step


@dataclass(frozen=True, kw_only=True)
class JobKey:
    """Which job: one open incident each."""

    cluster_arn: str
    namespace: str
    kind: str
    name: str
    drill: bool = False
    """A drill's is no real job's, whatever its name: a real alarm must never join a dry run, nor a drill a recovery."""

    def __str__(self) -> str:
        return f"{self.cluster_arn}#{self.namespace}#{self.kind}#{self.name}" + ("#drill" if self.drill else "")


@dataclass(frozen=True, kw_only=True)
class Cordon:
    """What CordonNode did, and what was there before."""

    at: str
    ours: bool
    """False: someone else had cordoned the node already; it is left theirs and never released by us."""
    previous_unschedulable: bool = False


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """The exchange of one instance. Written before the request is sent: the API has no client token."""

    old_instance_id: str
    intended_at: str
    requested_at: str = ""
    """Empty: the request may or may not have arrived."""
    new_instance_id: str = ""
    new_node_name: str = ""
    ready_at: str = ""


@dataclass(frozen=True, kw_only=True)
class SuspectNode:
    """A node under suspicion: one per node of the alarm's suspect rows."""

    node_name: str
    ranks: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    pod_names: tuple[str, ...] = ()
    """As the alarm says; once the node was looked up, those of them that were pods of the job."""
    instance_id: str = ""
    logical_id: str = ""
    instance_group: str = ""
    group_nodes: int = 0
    """Nodes of that group when it was looked up; 0 where it was not found."""
    claim_key: str = ""
    """Key of the node's claim in the table: the logical id, or the node's name; empty until claimed, and
    once it was given back."""
    present: bool = True
    """False: the node had left the cluster when it was looked up."""
    other_pods: tuple[str, ...] = ()
    """``namespace/name`` of other jobs' pods on the node; they block replacement until acknowledged."""
    cordon: Cordon | None = None
    reopened: str = ""
    """What somebody had taken off the quarantine when it was last looked at; ReplaceNode asks about it."""
    replacement: Replacement | None = None
    released_at: str = ""
    """When the node was given back after a rejection."""


class HealthCheckStatus(StrEnum):
    """Where the node's health check stands. A pass clears nobody: vendor suites miss most corrupting GPUs."""

    STARTED = "started"
    SKIPPED = "skipped"
    DEFERRED = "deferred"
    """Waits for the approval, because a failed check could replace the node on its own."""
    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """The health check of the suspect instances."""

    status: HealthCheckStatus
    reason: str
    instance_ids: tuple[str, ...] = ()
    started_at: str = ""
    settled_at: str = ""
    labels_before: Mapping[str, str] = field(default_factory=dict)
    """Instance id -> the node's progress label before the start: nodes keep the label of earlier checks."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What SnapshotEvidence kept."""

    uri: str
    items: Mapping[str, str] = field(default_factory=dict)
    """Name -> URI, or ``no data: <why>``. Missing is never the same as clean."""
    findings: tuple[str, ...] = ()
    """Sentences for the approval page, e.g. "GPU-... 14 K hotter than the node's median"."""


@dataclass(frozen=True, kw_only=True)
class PastIncident:
    """An earlier incident of one of the suspects' GPUs."""

    incident_id: str
    gpu_uuid: str
    node_name: str
    verdict_kind: str
    at: str
    rejected: bool = False
    """A person rejected the accusation, as its record says now."""
    linked: bool = False
    """The present incident came of its relaunch: one story, not two witnesses."""


@dataclass(frozen=True, kw_only=True)
class TrainingAttempt:
    """An attempt of a job that was heard of. Times as `lambdas.domain.incident.iso` writes them."""

    attempt_id: str
    heard_at: str
    """When the recovery heard of it first, by its own clock."""
    seen_at: str
    """Its newest sign of training, by the trainer's clock, but never later than it was heard."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What of the training's pod a confirmation runs with, in Kubernetes' own form; see `cluster_workload`."""

    pod: Mapping[str, Any]
    """Fields of the pod's spec."""
    container: Mapping[str, Any]
    """Fields of the training container."""
    gpu_resource: str = ""
    """``nvidia.com/gpu``; empty where the training asks for no GPU."""
    queue: Mapping[str, str] = field(default_factory=dict)
    """Labels by which Kueue admits the training job, and so the confirmation's."""
    left_out: tuple[str, ...] = ()
    """``NAME: why`` of the variables that kernels and imports read and the confirmation goes without; also of whole
    Secrets and ConfigMaps."""
    refused: str = ""
    """Why no Job can be made of it, as a sentence; empty where one can."""


@dataclass(frozen=True, kw_only=True)
class ConfirmedNode:
    """One node's part of a confirmation."""

    node_name: str
    """Empty for the healthy node until the scheduler has chosen one."""
    job_name: str
    """Of the Kubernetes Job; empty where none was begun."""
    job_uid: str = ""
    """Of the Kubernetes Job: what names and labels say of a pod anybody may write."""
    suspect: bool = True
    """False: a healthy node, for comparison."""
    ended: bool = False
    settled: bool = False
    """As `truestep.contract.NodeReport`'s."""
    gpus: tuple[DeviceReport, ...] = ()
    problem: str = ""
    """Why nothing was run, as a sentence; also while it waits."""


class ConfirmationStatus(StrEnum):
    """What running the failing computation again showed."""

    RUNNING = "running"
    REPRODUCED = "reproduced"
    """A suspect computes it wrongly again, and no healthy node does."""
    NOT_REPRODUCED = "not_reproduced"
    """No run differed, which proves nothing."""
    UNSETTLED = "unsettled"
    """Runs differed, but they do not single out one of the suspects, or not on what the alarm accuses."""
    SOFTWARE = "software"
    """A healthy node differs as well."""
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What running the failing computation again on the suspects showed. No match proves nothing."""

    status: ConfirmationStatus
    reason: str
    hit_probability: float | None = None
    """Measured on the suspect: the lower end of the 95% interval (Wilson) of the share of its runs that differed. A
    better p for the checkpoint margin than the policy's."""
    at: str = ""
    """When it was begun."""
    nodes: tuple[ConfirmedNode, ...] = ()
    named: str = ""
    """The node that it singles out, where the alarm had several suspects."""
    evidence: str = ""
    """URI of what the nodes reported."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What the recovery would do, for the person who decides."""

    action: str
    """``replace``, or ``none`` where one event does not carry advice."""
    reason: str
    cause: str
    """``open`` or ``hardware``; see `truestep.contract.VerdictCause`."""


@dataclass(frozen=True, kw_only=True)
class DecidedNode:
    """What of a suspect node a decision was about."""

    node_name: str
    instance_id: str
    other_pods: tuple[str, ...] = ()
    """Other jobs' pods on it, whose loss an approval accepts."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A person's answer. Recorded once; the first one wins."""

    approved: bool
    at: str
    decided_by: str
    """An identity where one is known; "by link" where only possession of the link is."""
    comment: str = ""
    nodes: tuple[DecidedNode, ...] = ()
    """The suspects as they were on record when the person decided."""
    mac: str = ""
    """Of `lambdas.domain.decision.digest_of`, by the key that decide_approval alone can sign with; base64."""


@dataclass(frozen=True, kw_only=True)
class Approval:
    """The question to a person."""

    requested_at: str
    expires_at: str
    announced_at: str = ""
    """When people were last told; empty until the first message is out. A state that died before it tells them then."""
    announcements: int = 0
    ask_again_at: str = ""
    """When a person wants to be asked again; empty: the usual reminder."""
    task_token: str = ""
    """Secret: never logged, shown or sent."""
    decision: Decision | None = None
    set_aside: tuple[Decision, ...] = ()
    """Earlier decisions that do not count, oldest first; the timeline says why."""


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """The checkpoint to resume from, and why not a newer one."""

    checkpoint: CheckpointRef
    reason: str
    lost_steps: int
    margin_steps: int = 0
    hit_probability: float = 1.0
    """The hit probability p per step for which the margin holds."""
    risk: float = 0.05
    """The accepted probability that the checkpoint is corrupt all the same."""
    refused: tuple[str, ...] = ()
    """A sentence for every newer candidate."""


@dataclass(frozen=True, kw_only=True)
class Relaunch:
    """The orders to resume that the incident gave, and who has followed them. Written before the job is let run."""

    at: str
    """When the newest order was issued, as it says itself, or the one before was withdrawn."""
    orders: tuple[str, ...] = ()
    """SHA-256 of every order (`truestep.contract.directive_sha256`), the newest last."""
    checkpoint: CheckpointRef | None = None
    """What the newest order says to resume from: another one may have been chosen since."""
    attempts: tuple[str, ...] = ()
    """Attempts that said they resumed for the incident, in the order in which that was heard."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the run that follows the incident's newest order said about itself."""

    task_token: str = ""
    """Secret: never logged, shown or sent."""
    resumed_at: str = ""
    verified_at: str = ""
    first_step: Step | None = None
    verified_step: Step | None = None
    checkpoint: CheckpointRef | None = None
    nodes: tuple[str, ...] = ()
    problem: str = ""
    """A sentence where the run resumed from something else than ordered, or raised a new alarm."""


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """Where the workflow stopped, and waits for a person to say from which state it goes on."""

    failed_state: str
    error: str
    cause: str
    at: str
    announced_at: str = ""
    """When people were last told of this stop; empty until the first message is out."""
    task_token: str = ""
    """Secret: never logged, shown or sent."""
    resume_from: str = ""
    """The state a person chose; empty while it waits."""
    delivered: bool = False
    """The execution has taken the choice. Until then Escalate, entered again, goes on from it by itself."""
    execution: str = ""
    """ARN of the execution that waits here; of its successor, once one goes on because it had ended."""


@dataclass(frozen=True, kw_only=True)
class TimelineEntry:
    """One thing that happened."""

    at: str
    state: str
    outcome: str
    reason: str
    attempts: int = 1
    """Repeated polls of one state share an entry, so that the record stays small."""
