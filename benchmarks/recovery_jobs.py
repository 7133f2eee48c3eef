"""Jobs whose pods only wait, in every kind that the recovery stops and starts, with and without a Kueue queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import GenericNamespacedResource, create_api_info
from lightkube.resources.core_v1 import ConfigMap

_POD: Mapping[str, Any] = {
    "terminationGracePeriodSeconds": 1,
    "restartPolicy": "Never",
    "containers": [{"name": "training", "image": "training", "command": ["sleep", "900"]}],
}
_TEMPLATE: Mapping[str, Any] = {"spec": _POD}


@dataclass(frozen=True, kw_only=True)
class _Kind:
    group: str
    version: str
    plural: str
    label: str
    policy: tuple[str, ...] = ()
    """Path of the object that holds ``suspend``, below ``spec``."""


KINDS: Mapping[str, _Kind] = {
    "HyperPodPyTorchJob": _Kind(
        group="sagemaker.amazonaws.com",
        version="v1",
        plural="hyperpodpytorchjobs",
        label="HPJob",
        policy=("runPolicy",),
    ),
    "PyTorchJob": _Kind(
        group="kubeflow.org",
        version="v1",
        plural="pytorchjobs",
        label="training.kubeflow.org/job-name",
        policy=("runPolicy",),
    ),
    "TrainJob": _Kind(
        group="trainer.kubeflow.org", version="v1alpha1", plural="trainjobs", label="jobset.sigs.k8s.io/jobset-name"
    ),
    "JobSet": _Kind(
        group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets", label="jobset.sigs.k8s.io/jobset-name"
    ),
    "Job": _Kind(group="batch", version="v1", plural="jobs", label="batch.kubernetes.io/job-name"),
}


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """Kind and size of a job, and the Kueue queue that admits it, if any."""

    kind: str = "HyperPodPyTorchJob"
    pods: int = 2
    queue: str = ""

    def spec(self) -> dict[str, Any]:
        """The job's spec."""
        match self.kind:
            case "HyperPodPyTorchJob":
                replicas = {"name": "worker", "replicas": self.pods, "template": _TEMPLATE}
                return {"nprocPerNode": "1", "runPolicy": {"suspend": False}, "replicaSpecs": [replicas]}
            case "PyTorchJob":
                workers = {"replicas": self.pods - 1, "template": _TEMPLATE}
                specs = {"Master": {"replicas": 1, "template": _TEMPLATE}, "Worker": workers}
                return {"runPolicy": {"suspend": False}, "pytorchReplicaSpecs": specs}
            case "TrainJob":
                trainer = {"numNodes": self.pods, "image": "training", "command": ["sleep", "900"]}
                return {"suspend": False, "runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
            case "JobSet":
                job = {"spec": {"parallelism": self.pods, "completions": self.pods, "template": _TEMPLATE}}
                return {"suspend": False, "replicatedJobs": [{"name": "worker", "replicas": 1, "template": job}]}
        indexed = {"completionMode": "Indexed", "parallelism": self.pods, "completions": self.pods}
        return {"suspend": False, "template": _TEMPLATE, **indexed}


class WaitingJob:
    """One job on the cluster stand-in."""

    def __init__(self, client: Client, namespace: str, name: str, shape: JobShape) -> None:
        self._client = client
        self._kind = KINDS[shape.kind]
        self._resource = _raw(self._kind.group, self._kind.version, shape.kind, self._kind.plural)
        self.namespace = namespace
        self.name = name
        self.shape = shape

    def create(self) -> None:
        """Submit it."""
        labels = {"kueue.x-k8s.io/queue-name": self.shape.queue} if self.shape.queue else {}
        manifest = {
            "apiVersion": f"{self._kind.group}/{self._kind.version}",
            "kind": self.shape.kind,
            "metadata": {"name": self.name, "namespace": self.namespace, "labels": labels},
            "spec": self.shape.spec(),
        }
        self._client.create(self._resource(manifest))

    def object(self) -> dict[str, Any]:
        """The job as the API server has it."""
        return dict(self._client.get(self._resource, self.name, namespace=self.namespace))

    def pods(self) -> list[dict[str, Any]]:
        """Its pods, by name."""
        pods = self._client.list(_Pod, namespace=self.namespace, labels={self._kind.label: self.name})
        return sorted((dict(pod) for pod in pods), key=lambda pod: str(pod["metadata"]["name"]))

    def all_run(self) -> bool:
        """Whether every pod of it runs."""
        pods = self.pods()
        return len(pods) == self.shape.pods and all(pod.get("status", {}).get("phase") == "Running" for pod in pods)

    def suspended(self) -> bool:
        """What its spec asks for."""
        place: Any = self.object()["spec"]
        for part in self._kind.policy:
            place = place[part]
        return bool(place.get("suspend"))

    def directive(self) -> str:
        """The resume directive that its pods mount; empty where there is none."""
        try:
            found = self._client.get(ConfigMap, f"truestep-resume-{self.name}", namespace=self.namespace)
        except ApiError as error:
            if error.status.code == 404:
                return ""
            raise
        return str((found.data or {}).get("resume.json", ""))

    def delete(self) -> None:
        """Remove it; its pods follow."""
        self._client.delete(self._resource, self.name, namespace=self.namespace)


def _raw(group: str, version: str, kind: str, plural: str) -> Any:
    """A resource whose objects are plain JSON."""
    info = create_api_info(group, version, kind, plural)
    return type(kind, (GenericNamespacedResource,), {"_api_info": info})


_Pod = _raw("", "v1", "Pod", "pods")
