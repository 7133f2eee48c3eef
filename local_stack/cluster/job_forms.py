"""The kinds of training jobs that the stand-in operator runs: where each keeps its switch, and which pods it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from local_stack.cluster.kubernetes.resources import (
    HYPERPOD_PYTORCH_JOBS,
    JOB_SETS,
    JOBS,
    PYTORCH_JOBS,
    TRAIN_JOBS,
    Resource,
)
from local_stack.cluster.kubernetes.store import Json


@dataclass(frozen=True, kw_only=True)
class PodPlan:
    """One pod of a job: its name, the template it is made from, and the labels its operator adds."""

    name: str
    template: Json
    labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class JobForm:
    """One kind of job. policy_path: where `suspend` is, below the object's root."""

    resource: Resource
    policy_path: tuple[str, ...]
    label: str
    """Of its pods; the value is the job's name."""
    plans: Callable[[Json], list[PodPlan]]
    shuffles_ranks: bool = False
    """Whether ranks are given in another order than the pods' own."""

    def suspended(self, job: Json) -> bool:
        """What the job's spec asks for."""
        return bool(self._policy(job).get("suspend"))

    def set_suspended(self, job: Json, suspended: bool) -> None:
        """Write the switch into the document."""
        place = job
        for part in self.policy_path:
            place = place.setdefault(part, {})
        place["suspend"] = suspended

    def retries(self, job: Json) -> int:
        """How often the whole job is started again after a failure."""
        policy = self._policy(job)
        return int(policy.get("jobMaxRetryCount", policy.get("backoffLimit", 0)))

    def _policy(self, job: Json) -> Mapping[str, Any]:
        place: Any = job
        for part in self.policy_path:
            place = place.get(part) or {}
        found: Mapping[str, Any] = place
        return found


def _hyperpod(job: Json) -> list[PodPlan]:
    return [
        PodPlan(name=f"{_name(job)}-{replica['name']}-{index}", template=replica["template"], labels={})
        for replica in job["spec"]["replicaSpecs"]
        for index in range(replica.get("replicas", 1))
    ]


def _kubeflow(job: Json) -> list[PodPlan]:
    specs = job["spec"]["pytorchReplicaSpecs"]
    return [
        PodPlan(
            name=f"{_name(job)}-{role.lower()}-{index}",
            template=specs[role]["template"],
            labels={
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(index),
            },
        )
        for role in ("Master", "Worker")
        if role in specs
        for index in range(specs[role].get("replicas", 1))
    ]


def _train_job(job: Json) -> list[PodPlan]:
    """The pods of a runtime of one replicated job ``node``, whose container the trainer's fields fill in."""
    trainer = job["spec"]["trainer"]
    container = {"name": "node", **{key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}}
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer", "jobset.sigs.k8s.io/replicatedjob-name": "node"}
    return [
        PodPlan(name=f"{_name(job)}-node-0-{index}", template=template, labels=labels)
        for index in range(trainer.get("numNodes", 1))
    ]


def _job_set(job: Json) -> list[PodPlan]:
    return [
        PodPlan(
            name=f"{_name(job)}-{part['name']}-{replica}-{index}",
            template=part["template"]["spec"]["template"],
            labels={"jobset.sigs.k8s.io/replicatedjob-name": part["name"]},
        )
        for part in job["spec"]["replicatedJobs"]
        for replica in range(part.get("replicas", 1))
        for index in range(part["template"]["spec"].get("parallelism", 1))
    ]


def _batch(job: Json) -> list[PodPlan]:
    return [
        PodPlan(
            name=f"{_name(job)}-{index}",
            template=job["spec"]["template"],
            labels={"batch.kubernetes.io/job-completion-index": str(index)},
        )
        for index in range(job["spec"].get("parallelism", 1))
    ]


def _name(job: Json) -> str:
    return str(job["metadata"]["name"])


JOB_FORMS = (
    JobForm(
        resource=HYPERPOD_PYTORCH_JOBS, policy_path=("spec", "runPolicy"), label="HPJob", plans=_hyperpod,
        shuffles_ranks=True,
    ),
    JobForm(
        resource=PYTORCH_JOBS, policy_path=("spec", "runPolicy"), label="training.kubeflow.org/job-name",
        plans=_kubeflow,
    ),
    JobForm(resource=TRAIN_JOBS, policy_path=("spec",), label="jobset.sigs.k8s.io/jobset-name", plans=_train_job),
    JobForm(resource=JOB_SETS, policy_path=("spec",), label="jobset.sigs.k8s.io/jobset-name", plans=_job_set),
    JobForm(resource=JOBS, policy_path=("spec",), label="batch.kubernetes.io/job-name", plans=_batch),
)  # fmt: skip


def is_job_pod(pod: Mapping[str, Any]) -> bool:
    """Whether the pod belongs to a training job of any kind."""
    labels = pod["metadata"].get("labels") or {}
    return any(form.label in labels for form in JOB_FORMS)
