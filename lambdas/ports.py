"""What the handlers need from the world, as Protocols; `lambdas.adapters` has the AWS and Kubernetes sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from lambdas.domain.breaker import ClaimAnswer
from lambdas.domain.checkpoint_choice import Candidate
from lambdas.domain.cluster_jobs import PodView
from lambdas.domain.cluster_nodes import CordonPlan, ReleasePlan
from lambdas.domain.cluster_replacement import ReplaceAnswer
from lambdas.domain.incident import Incident
from lambdas.domain.records import JobKey, PastIncident, TrainingAttempt
from truestep.contract import Alarm, CheckpointEvent, CheckpointRef, ResumeDirective


class Clock(Protocol):
    """Time, passed in so that decisions can be repeated."""

    def now(self) -> datetime:
        """The time now, in UTC, zone-aware."""


@dataclass(frozen=True, kw_only=True)
class RecordedCheckpoint:
    """A checkpoint as the training's events described it."""

    event: CheckpointEvent
    trust: str
    """``written``, ``trusted`` or ``revoked``. A hint: the marks beside the manifest decide."""


@dataclass(frozen=True, kw_only=True)
class SeenJob:
    """A job, and its newest sign of training."""

    job: JobKey
    seen_at: str


class IncidentStore(Protocol):
    """The recovery's memory. Every write is conditional: two writers at once never both win."""

    def record_alarm(self, alarm: Alarm, received_at: datetime) -> str | None:
        """Keep the alarm as received. Returns the id of the incident it already belongs to, or None."""

    def assign_alarm(self, alarm: Alarm, incident_id: str) -> None:
        """Note which incident the alarm belongs to; ``notified`` where it opened none."""

    def alarms_of(self, incident: Incident) -> tuple[str, ...]:
        """Ids of the alarms that belong to the incident, sorted: its own, and the newest of those that joined it."""

    def open(self, incident: Incident, *, taking_over: str | None = None) -> Incident:
        """Claim the job and write the incident, both or neither. Returns the incident that holds the job then.

        That is the given one (version 1), or the one that held the claim before; `taking_over` names the incident
        whose claim may be replaced.
        """

    def holder(self, job: JobKey) -> Incident | None:
        """The incident that holds the job's claim."""

    def job_holder(self, job: JobKey) -> str:
        """Id of the incident that holds the job's claim; empty where none does."""

    def load(self, incident_id: str) -> Incident:
        """Strongly consistent. Raises `IncidentNotFoundError`."""

    def save(self, incident: Incident) -> Incident:
        """Write if nobody has since `incident.version`; returns it with its new version.

        Raises `ConcurrentUpdateError` otherwise.
        """

    def claim_nodes(self, incident_id: str, cluster_arn: str, node_keys: Sequence[str], *, limit: int) -> ClaimAnswer:
        """Claim all of the nodes or none, unless more than `limit` of the cluster's would then be quarantined.

        Claiming again what is one's own is granted. `node_keys` are logical ids or node names; at most 64.
        """

    def release_nodes(self, incident_id: str, cluster_arn: str, node_keys: Sequence[str]) -> None:
        """Give back those of the nodes that this incident holds, and their places in the breaker."""

    def quarantined(self, cluster_arn: str) -> frozenset[str]:
        """Keys of the cluster's nodes in quarantine."""

    def node_holder(self, key: str) -> str | None:
        """Id of the incident that holds the node's claim."""

    def release_job(self, incident: Incident) -> None:
        """Give the job's claim back if this incident holds it."""

    def record_gpus(self, incident: Incident) -> None:
        """Write the incident into the history of every suspect's GPU."""

    def gpu_history(self, gpu_uuid: str, *, limit: int = 20) -> tuple[PastIncident, ...]:
        """Incidents of a GPU, newest first."""

    def record_attempt(self, job: JobKey, attempt: TrainingAttempt) -> None:
        """Keep a sign of training, as `lambdas.domain.attempts.with_sign` has it."""

    def attempts(self, job: JobKey) -> tuple[TrainingAttempt, ...]:
        """The job's attempts in the order in which they were first heard of, the newest last."""

    def record_checkpoint(self, job: JobKey, event: CheckpointEvent, trust: str) -> None:
        """Keep what an event said of a checkpoint. Trust only rises: trusted stays trusted, revoked stays revoked."""

    def checkpoints(self, job: JobKey) -> tuple[RecordedCheckpoint, ...]:
        """What events said of the job's checkpoints, newest step first."""

    def newest_trusted(self, job: JobKey, *, among: int) -> CheckpointEvent | None:
        """The trusted checkpoint of the highest step, if it is among the job's `among` highest steps."""

    def open_incident_ids(self) -> tuple[str, ...]:
        """Every incident that is not closed, newest first. The listing follows the writes by a second or so."""

    def recent_incident_ids(self, limit: int) -> tuple[str, ...]:
        """The newest incidents, closed ones too, newest first."""

    def recent_jobs(self, limit: int) -> tuple[SeenJob, ...]:
        """The jobs whose training was seen last, newest first."""


class Links(Protocol):
    """Signs and verifies links that let their holder decide an incident."""

    def url(self, incident_id: str, *, expires_at: datetime) -> str:
        """The page of the incident, with a signature over incident, scope and expiry."""

    def verify(self, incident_id: str, query: Mapping[str, str], *, now: datetime) -> None:
        """Raises `LinkError` unless the query is one that `url` made for this incident and has not expired."""


class DecisionSigner(Protocol):
    """Signs what a person decided."""

    def sign(self, digest: str) -> str:
        """The MAC of `lambdas.domain.decision.digest_of`, for the record."""


class Notifier(Protocol):
    """Tells people."""

    def notify(self, subject: str, message: str, *, attributes: Mapping[str, str], url: str = "") -> None:
        """Publish to the operators' topic. `subject` is cut to 100 ASCII characters. `url`: where the reader acts."""


class Executions(Protocol):
    """Starts the workflow and completes its waiting states."""

    def start(self, incident_id: str) -> None:
        """Start the workflow for the incident; starting it twice is once."""

    def ended(self, execution: str) -> bool:
        """Whether the execution of this ARN is over, however it ended."""

    def succeed(self, execution: str, incident_id: str, resume_from: str) -> str:
        """Start the one successor of an execution that ended, at a state of the workflow; returns its ARN.

        Starting it twice is once.
        """

    def complete(self, task_token: str, output: Mapping[str, object]) -> bool:
        """Let a waiting state go on. False where the token was used before or its state is over: already decided."""


# --- the cluster's side -------------------------------------------------------------------------------------------


class Cluster(Protocol):
    """The Kubernetes API of one cluster. No answer, 429 and 5xx are raised as `TransientError`.

    Node, pod and job objects are JSON documents as the API server sends them, for the domain to judge.
    """

    def node(self, name: str) -> Mapping[str, Any] | None:
        """The node, or None where it has left."""

    def cordon(self, name: str, incident_id: str, at: str) -> CordonPlan | None:
        """Quarantine the node for the incident in one guarded write; twice is once. None where it has left."""

    def release(self, name: str, incident_id: str) -> ReleasePlan | None:
        """Undo this incident's quarantine and nothing else; twice is once. None where the node has left."""

    def pod(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """The pod, or None."""

    def pods_on(self, node_name: str) -> tuple[PodView, ...]:
        """All pods bound to the node."""

    def job(self, job: JobKey) -> Mapping[str, Any] | None:
        """The job's object, or None. Raises `UnknownJobKindError`."""

    def job_pods(self, job: JobKey) -> tuple[PodView, ...]:
        """The pods of the job that exist, terminating ones included."""

    def suspend(self, job: JobKey) -> bool:
        """Ask for the job to stop; twice is once. False: there is no such job."""

    def unsuspend(self, job: JobKey) -> bool:
        """Let the job run again; twice is once. False: there is no such job."""

    def log_tail(self, namespace: str, pod_name: str, lines: int) -> str | None:
        """The last lines of a pod's log; None where the pod is gone or has not started."""

    def write_directive(self, job: JobKey, directive: ResumeDirective) -> bool:
        """Put the resume directive where the job's pods mount it. True if anything had to be written."""

    def read_directive(self, job: JobKey) -> ResumeDirective | None:
        """The directive that lies there now; None where none can be read."""


class BatchJobs(Protocol):
    """Kubernetes Jobs of the recovery's own. Errors as `Cluster`'s."""

    def job(self, job: JobKey) -> Mapping[str, Any] | None:
        """The job's object, or None."""

    def create_batch_job(self, manifest: Mapping[str, Any]) -> str:
        """Create a Job; its UID. Raises `TransientError` where one of its name has just come."""

    def delete_batch_job(self, namespace: str, name: str) -> bool:
        """Delete a Job and its pods; twice is once. False: there was none."""

    def labelled_pods(self, namespace: str, label: str, value: str) -> Sequence[Mapping[str, Any]]:
        """Pods of the namespace whose label has this value."""


@dataclass(frozen=True, kw_only=True)
class InstanceState:
    """A HyperPod instance as the control plane describes it."""

    instance_id: str
    logical_id: str
    instance_group: str
    status: str
    """``Running``, ``Pending``, ``DeepHealthCheckInProgress``, ... as ``InstanceStatus.Status``."""
    message: str = ""
    node_name: str = ""


class HyperPod(Protocol):
    """The control plane of one HyperPod cluster."""

    def instances(self) -> tuple[InstanceState, ...]:
        """All instances; follows the pages."""

    def instance(self, *, instance_id: str = "", logical_id: str = "") -> InstanceState | None:
        """One instance by either id, or None."""

    def automatic_recovery(self) -> bool:
        """Whether ``NodeRecovery`` is Automatic: HyperPod then reboots or replaces nodes that fail a check."""

    def start_health_check(self, instance_group: str, instance_ids: Sequence[str]) -> None:
        """Start a deep health check on these instances. Raises ValueError without ids: blank means the whole group."""

    def describe_node(self, *, instance_id: str = "", logical_id: str = "") -> Mapping[str, Any] | None:
        """``NodeDetails`` as the API returns it, or None."""

    def replace(self, instance_id: str) -> ReplaceAnswer:
        """Ask for the instance to be exchanged, by its *instance* id: a logical id would name the new one as well."""


class Metrics(Protocol):
    """GPU metrics around a point in time."""

    def series(self, query: str, *, start: datetime, end: datetime, step_seconds: int) -> list[dict[str, Any]]:
        """A range query's result in Prometheus' format; an empty list is "no data", never "clean"."""


class CheckpointCatalog(Protocol):
    """The checkpoints of a run, from the storage's own marks where they can be read, else from the events."""

    def candidates(self, root_uri: str, recorded: Iterable[RecordedCheckpoint]) -> tuple[Candidate, ...]:
        """Newest step first; a checkpoint without a manifest does not exist."""

    def missing_files(self, checkpoint: CheckpointRef) -> str:
        """What of the manifest's files is not there with the listed size; empty where all are."""

    def revoke(self, checkpoint: CheckpointRef, *, incident_id: str, reason: str, at: str) -> bool:
        """Write the permanent revocation mark; twice is once. False where the storage is out of reach."""
