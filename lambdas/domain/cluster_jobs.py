"""Training jobs on Kubernetes: how each kind is suspended, whose a pod is, when a job has really stopped. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from truestep.contract import TruestepError
from truestep.contract.words import counted

KUEUE_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUEUE_LABELS: Final = (KUEUE_QUEUE_LABEL, "kueue.x-k8s.io/priority-class")
"""Of a job: the queue that admits it, and its priority there."""
KUEUE_OWNER_LABEL = "kueue.x-k8s.io/job-uid"
"""Of a Workload; the value is its job's UID."""
CONFIRMATION_LABEL = "truestep.ai/incident"
"""Of a confirmation's Job and its pod; the value is the incident's id."""
AUTO_RESUME: Final = "sagemaker.amazonaws.com/enable-job-auto-resume"
"""With "true", HyperPod starts the job again when its pods are lost, and takes a stop of ours for a loss."""
AUTO_RESUME_PUT_OFF: Final = "truestep.ai/auto-resume-put-off"
"""Our note on a job whose `AUTO_RESUME` is "false" only until the recovery lets it run again."""
_FINISHED_PHASES = ("Succeeded", "Failed")


class UnknownJobKindError(TruestepError):
    """The alarm names a job kind that the recovery cannot stop."""


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """Where the API server keeps a kind of job, and how it is suspended."""

    group: str
    version: str
    plural: str
    suspend_path: tuple[str, ...]
    """Path of the boolean below the object's root."""
    pod_label: str
    """Label of the job's pods whose value is the job's name."""
    pods: Callable[[Mapping[str, Any]], int]
    """How many pods a job of this spec has; 0 where its spec does not say."""


def _replicas(parts: Iterable[Mapping[str, Any]]) -> int:
    return sum(int(part.get("replicas", 1)) for part in parts)


def _job_set_pods(spec: Mapping[str, Any]) -> int:
    parts = spec.get("replicatedJobs") or []
    return sum(int(part.get("replicas", 1)) * int(part["template"]["spec"].get("parallelism", 1)) for part in parts)


JOB_KINDS: Mapping[str, JobKind] = {
    "HyperPodPyTorchJob": JobKind(
        group="sagemaker.amazonaws.com",
        version="v1",
        plural="hyperpodpytorchjobs",
        suspend_path=("spec", "runPolicy", "suspend"),
        pod_label="HPJob",
        pods=lambda spec: _replicas(spec.get("replicaSpecs") or []),
    ),
    "PyTorchJob": JobKind(
        group="kubeflow.org",
        version="v1",
        plural="pytorchjobs",
        suspend_path=("spec", "runPolicy", "suspend"),
        pod_label="training.kubeflow.org/job-name",
        pods=lambda spec: _replicas((spec.get("pytorchReplicaSpecs") or {}).values()),
    ),
    "TrainJob": JobKind(
        group="trainer.kubeflow.org",
        version="v1alpha1",
        plural="trainjobs",
        suspend_path=("spec", "suspend"),
        # Its pods belong to the JobSet of the same name that the trainer makes of it.
        pod_label="jobset.sigs.k8s.io/jobset-name",
        # Where it says none, the number is its runtime's.
        pods=lambda spec: int((spec.get("trainer") or {}).get("numNodes", 0)),
    ),
    "JobSet": JobKind(
        group="jobset.x-k8s.io",
        version="v1alpha2",
        plural="jobsets",
        suspend_path=("spec", "suspend"),
        pod_label="jobset.sigs.k8s.io/jobset-name",
        pods=_job_set_pods,
    ),
    "Job": JobKind(
        group="batch",
        version="v1",
        plural="jobs",
        suspend_path=("spec", "suspend"),
        pod_label="batch.kubernetes.io/job-name",
        pods=lambda spec: int(spec.get("parallelism", 1)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class PodView:
    """What the recovery looks at in a pod."""

    namespace: str
    name: str
    uid: str
    node_name: str
    phase: str
    terminating: bool
    job_name: str
    """Name of the job that its labels name; empty for a pod of no job."""
    from_daemon_set: bool = False
    confirms: bool = False
    """It belongs to an incident's confirmation."""


class StopProgress(StrEnum):
    """Whether a suspended job has stopped."""

    STOPPED = "stopped"
    PENDING = "pending"
    OVERDUE = "overdue"


@dataclass(frozen=True, kw_only=True)
class StopJudgement:
    """The progress and the sentence that explains it."""

    progress: StopProgress
    reason: str


def job_kind(kind: str) -> JobKind:
    """How the kind is handled. Raises `UnknownJobKindError` naming the kinds that can be."""
    try:
        return JOB_KINDS[kind]
    except KeyError:
        raise UnknownJobKindError(
            f"job kind {kind!r} cannot be suspended by this recovery; it knows {', '.join(sorted(JOB_KINDS))}. "
            "Stop the job by hand, then resume the incident"
        ) from None


def suspend_patch(kind: JobKind, suspended: bool) -> dict[str, Any]:
    """The merge patch that sets the kind's suspend field."""
    value: Any = suspended
    for key in reversed(kind.suspend_path):
        value = {key: value}
    return {str(key): item for key, item in value.items()}


def auto_resume_patch(job: Mapping[str, Any], *, off: bool) -> dict[str, Any]:
    """The merge patch that puts HyperPod's auto-resume off, or takes that back; empty where nothing is to be done."""
    annotations = job["metadata"].get("annotations") or {}
    if off and annotations.get(AUTO_RESUME) == "true":
        return {"metadata": {"annotations": {AUTO_RESUME: "false", AUTO_RESUME_PUT_OFF: "true"}}}
    if not off and AUTO_RESUME_PUT_OFF in annotations:
        return {"metadata": {"annotations": {AUTO_RESUME: "true", AUTO_RESUME_PUT_OFF: None}}}
    return {}


def may_resume_itself(job: Mapping[str, Any]) -> bool:
    """Whether HyperPod may start the job again though it is suspended: the annotation on it, put off or not, or on its
    pod templates, where it cannot be put off."""
    own = job["metadata"].get("annotations") or {}
    return AUTO_RESUME_PUT_OFF in own or any(found.get(AUTO_RESUME) == "true" for found in (own, *_of_templates(job)))


def _of_templates(value: Any) -> Iterator[Mapping[str, str]]:
    if isinstance(value, Mapping):
        template = value.get("template")
        if isinstance(template, Mapping):
            yield (template.get("metadata") or {}).get("annotations") or {}
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _of_templates(inner)


def is_suspended(kind: JobKind, job: Mapping[str, Any]) -> bool:
    """What the job's spec asks for; whether its pods are gone is another question."""
    value: Any = job
    for key in kind.suspend_path:
        value = (value or {}).get(key)
    return bool(value)


def queue_of(job: Mapping[str, Any]) -> str:
    """The Kueue queue that admits the job, or empty. Kueue owns its ``suspend``: the Workload's ``active`` stops it."""
    labels = job.get("metadata", {}).get("labels") or {}
    return str(labels.get(KUEUE_QUEUE_LABEL, ""))


def queue_labels(job: Mapping[str, Any]) -> dict[str, str]:
    """The labels by which Kueue admits the job; empty where it names no queue. A Job of ours waits in the same queue:
    where Kueue manages every Job of a namespace, one without a queue is never admitted."""
    labels = job.get("metadata", {}).get("labels") or {}
    return {name: str(labels[name]) for name in KUEUE_LABELS if name in labels} if queue_of(job) else {}


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """Read a pod document. The job is taken from whichever job label of `JOB_KINDS` the pod carries."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    owners = metadata.get("ownerReferences") or []
    return PodView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        node_name=pod.get("spec", {}).get("nodeName") or "",
        phase=pod.get("status", {}).get("phase") or "",
        terminating=bool(metadata.get("deletionTimestamp")),
        job_name=next((labels[kind.pod_label] for kind in JOB_KINDS.values() if kind.pod_label in labels), ""),
        confirms=CONFIRMATION_LABEL in labels,
        from_daemon_set=any(owner.get("kind") == "DaemonSet" for owner in owners),
    )


def others_on_node(pods: Iterable[PodView], namespace: str, job_name: str) -> tuple[PodView, ...]:
    """Unfinished pods of other workloads: replacing the node kills them. Daemon sets' come back by themselves.

    A confirmation's pod is no loss to anybody.
    """
    return tuple(
        sorted(
            (
                pod
                for pod in pods
                if not pod.from_daemon_set
                and not pod.confirms
                and pod.phase not in _FINISHED_PHASES
                and (pod.namespace, pod.job_name) != (namespace, job_name)
            ),
            key=lambda pod: (pod.namespace, pod.name),
        )
    )


def expected_pods(kind: JobKind, job: Mapping[str, Any]) -> int:
    """With how many pods the job has started: an elastic one with its fewest; 0 where its spec does not say."""
    spec = job.get("spec") or {}
    return int((spec.get("elasticPolicy") or {}).get("minReplicas") or kind.pods(spec))


def judge_starting(pods: Iterable[PodView], *, expected: int = 0) -> tuple[bool, str]:
    """Whether a relaunched job runs: as many pods as it asks for run, or have run to their end.

    A pod that failed has not started: so ends a start that the SDK refuses. One whose place another pod has taken is no
    matter. expected: `expected_pods`. The sentence says what is missing.
    """
    seen = [pod for pod in pods if not pod.terminating]
    started = [pod for pod in seen if pod.phase in ("Running", "Succeeded")]
    failed = sorted(pod.name for pod in seen if pod.phase == "Failed")
    waiting = sorted(pod.name for pod in seen if pod.phase not in ("Running", *_FINISHED_PHASES))
    if not seen:
        return False, "the job has no pods yet"
    if started and not waiting and len(started) >= (expected or len(seen)):
        return True, f"{counted(len(started), 'pod')}, all running"
    missing = [f"{len(waiting)} not running yet: {_first(waiting)}"] if waiting else []
    if failed:
        missing.append(f"{len(failed)} failed: {_first(failed)}; the log of {failed[0]} says why")
    if len(seen) < expected:
        missing.append(f"{expected - len(seen)} not there yet")
    return False, f"of {counted(max(expected, len(seen)), 'pod')}, {', '.join(missing)}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def unfinished(pods: Iterable[PodView]) -> str:
    """Names of the pods that have not finished, the first eight of them; empty where all have."""
    return _first(sorted(pod.name for pod in pods if pod.phase not in _FINISHED_PHASES))


def judge_stopping(
    pods: Iterable[PodView], *, suspended: bool, asked_at: datetime, now: datetime, limit: timedelta
) -> StopJudgement:
    """Stopped only when no unfinished pod is left: a controller may revert ``suspend``, a pod may hang."""
    running = [pod for pod in pods if pod.phase not in _FINISHED_PHASES]
    if not running and suspended:
        return StopJudgement(progress=StopProgress.STOPPED, reason="the job is suspended and none of its pods is left")
    if running:
        what = f"{counted(len(running), 'pod')} still there: {unfinished(running)}"
    else:
        what = "its pods are gone, but the job's spec is no longer suspended: a controller reverted it"
    if now - asked_at >= limit:
        return StopJudgement(
            progress=StopProgress.OVERDUE,
            reason=f"the job has not stopped within {limit.total_seconds():.0f} s: {what}. Delete what is stuck, "
            "or stop the job by the means of its queue, then resume the incident at StopTraining",
        )
    return StopJudgement(progress=StopProgress.PENDING, reason=what)
