"""The training job as Kubernetes sees it: a HyperPodPyTorchJob, as a user would write it, plus the truestep lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAMESPACE = "research"
SHARED_VOLUME = "/fsx"
"""Mount path of the shared file system in every pod."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One run of the demo's training script on the cluster."""

    name: str
    nodes: int
    steps: int
    cluster_arn: str
    region: str
    event_bus: str
    checkpoint_bucket: str
    learning_rate: float = 1e-3

    @property
    def checkpoint_root(self) -> str:
        return f"s3://{self.checkpoint_bucket}/{self.name}"

    @property
    def final_directory(self) -> str:
        """Where the script leaves ``final.json``, below the shared volume."""
        return f"{SHARED_VOLUME}/{self.name}/final"

    def manifest(self) -> dict[str, Any]:
        """The HyperPodPyTorchJob object."""
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": self.name, "namespace": NAMESPACE},
            "spec": {
                "nprocPerNode": "1",
                "runPolicy": {"suspend": False, "cleanPodPolicy": "All", "jobMaxRetryCount": 2},
                "replicaSpecs": [{"name": "worker", "replicas": self.nodes, "template": {"spec": self._pod_spec()}}],
            },
        }

    def _pod_spec(self) -> dict[str, Any]:
        return {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "training",
                    "image": "training-image-with-truestep",
                    "command": [
                        "python",
                        "-m",
                        "demo.training",
                        "--steps",
                        str(self.steps),
                        "--learning-rate",
                        str(self.learning_rate),
                    ],
                    "env": self._environment(),
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                    "volumeMounts": [
                        {"name": "fsx", "mountPath": SHARED_VOLUME},
                        {"name": "resume", "mountPath": "/etc/truestep"},
                    ],
                }
            ],
            "volumes": [
                {"name": "fsx", "persistentVolumeClaim": {"claimName": "fsx"}},
                {"name": "resume", "configMap": {"name": f"truestep-resume-{self.name}", "optional": True}},
            ],
        }

    def _environment(self) -> list[dict[str, Any]]:
        values = {
            "TRUESTEP_JOB_NAME": self.name,
            "TRUESTEP_JOB_KIND": "HyperPodPyTorchJob",
            "TRUESTEP_RUN_ID": f"run-{self.name}",
            "TRUESTEP_CLUSTER_ARN": self.cluster_arn,
            "TRUESTEP_EVENT_BUS": self.event_bus,
            "TRUESTEP_OUTBOX_DIR": f"{SHARED_VOLUME}/{self.name}/outbox",
            "TRUESTEP_CHECKPOINT_ROOT": self.checkpoint_root,
            "TRUESTEP_DIRECTIVE": "/etc/truestep/resume.json",
            "TRUESTEP_FINAL_DIR": self.final_directory,
            "AWS_REGION": self.region,
            "OMP_NUM_THREADS": "1",
        }
        fields = {
            "NODE_NAME": "spec.nodeName",
            "POD_NAME": "metadata.name",
            "POD_UID": "metadata.uid",
            "POD_NAMESPACE": "metadata.namespace",
        }
        return [
            *({"name": name, "value": value} for name, value in values.items()),
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        ]
