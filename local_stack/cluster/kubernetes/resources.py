"""The resources that the stand-in serves, and how they differ."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One served resource type."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    singular: str
    kind: str
    namespaced: bool
    custom: bool = False
    """Defined by a CRD: no strategic merge patch, PUT needs a resourceVersion, generation counts spec changes."""
    has_status: bool = False
    """Serves `/status`; status is then ignored on the main resource."""
    counts_generation: bool = False
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    selectable_fields: frozenset[str] = field(default_factory=frozenset)
    """Fields a field selector may name besides metadata.name and metadata.namespace."""

    @property
    def api_version(self) -> str:
        """`v1` or `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def list_kind(self) -> str:
        """Kind of a list of these."""
        return f"{self.kind}List"


NODES = Resource(
    group="", version="v1", plural="nodes", singular="node", kind="Node", namespaced=False, has_status=True,
    short_names=("no",), subresources=("status",), selectable_fields=frozenset({"spec.unschedulable"}),
)  # fmt: skip
PODS = Resource(
    group="", version="v1", plural="pods", singular="pod", kind="Pod", namespaced=True, has_status=True,
    short_names=("po",), subresources=("status", "log", "binding", "eviction"),
    selectable_fields=frozenset({"spec.nodeName", "status.phase", "spec.restartPolicy", "spec.schedulerName"}),
)  # fmt: skip
CONFIG_MAPS = Resource(
    group="", version="v1", plural="configmaps", singular="configmap", kind="ConfigMap", namespaced=True,
    short_names=("cm",),
)  # fmt: skip
EVENTS = Resource(
    group="", version="v1", plural="events", singular="event", kind="Event", namespaced=True, short_names=("ev",),
    selectable_fields=frozenset(
        {
            "involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid",
            "reason", "type", "source",
        }
    ),
)  # fmt: skip
NAMESPACES = Resource(
    group="", version="v1", plural="namespaces", singular="namespace", kind="Namespace", namespaced=False,
    has_status=True, short_names=("ns",), subresources=("status",), selectable_fields=frozenset({"status.phase"}),
)  # fmt: skip
JOBS = Resource(
    group="batch", version="v1", plural="jobs", singular="job", kind="Job", namespaced=True, has_status=True,
    counts_generation=True, subresources=("status",),
)  # fmt: skip
HYPERPOD_PYTORCH_JOBS = Resource(
    group="sagemaker.amazonaws.com", version="v1", plural="hyperpodpytorchjobs", singular="hyperpodpytorchjob",
    kind="HyperPodPyTorchJob", namespaced=True, custom=True, has_status=True, counts_generation=True,
    subresources=("status",),
)  # fmt: skip
PYTORCH_JOBS = Resource(
    group="kubeflow.org", version="v1", plural="pytorchjobs", singular="pytorchjob", kind="PyTorchJob",
    namespaced=True, custom=True, has_status=True, counts_generation=True, subresources=("status",),
)  # fmt: skip
JOB_SETS = Resource(
    group="jobset.x-k8s.io", version="v1alpha2", plural="jobsets", singular="jobset", kind="JobSet",
    namespaced=True, custom=True, has_status=True, counts_generation=True, subresources=("status",),
)  # fmt: skip
TRAIN_JOBS = Resource(
    group="trainer.kubeflow.org", version="v1alpha1", plural="trainjobs", singular="trainjob", kind="TrainJob",
    namespaced=True, custom=True, has_status=True, counts_generation=True, subresources=("status",),
)  # fmt: skip
WORKLOADS = Resource(
    group="kueue.x-k8s.io", version="v1beta1", plural="workloads", singular="workload", kind="Workload",
    namespaced=True, custom=True, has_status=True, counts_generation=True, short_names=("wl",),
    subresources=("status",),
)  # fmt: skip
LOCAL_QUEUES = Resource(
    group="kueue.x-k8s.io", version="v1beta1", plural="localqueues", singular="localqueue", kind="LocalQueue",
    namespaced=True, custom=True, has_status=True, counts_generation=True, short_names=("queue",),
    subresources=("status",),
)  # fmt: skip

RESOURCES = (
    NODES, PODS, CONFIG_MAPS, EVENTS, NAMESPACES, JOBS, HYPERPOD_PYTORCH_JOBS, PYTORCH_JOBS, JOB_SETS, TRAIN_JOBS,
    WORKLOADS, LOCAL_QUEUES,
)  # fmt: skip


def find_resource(group: str, version: str, plural: str) -> Resource | None:
    """The resource served at that path, if any."""
    for resource in RESOURCES:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            return resource
    return None
