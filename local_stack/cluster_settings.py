"""Size and pace of the cluster stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RBAC_DIRECTORY = Path(__file__).resolve().parent.parent / "infra" / "kubernetes"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What the template cannot say about the clusters that it names.

    provisioning_seconds: from a replacement's request until its node is ready. seed: of instance ids and GPU UUIDs.
    """

    node_count: int = 4
    instance_group: str = "workers"
    instance_type: str = "ml.p5.48xlarge"
    seed: int = 0
    provisioning_seconds: float = 2.0
    health_check_seconds: float = 2.0
    node_recovery: str = "Automatic"
    rbac_directory: Path = _RBAC_DIRECTORY

    def document(self, clusters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the cluster server's configuration. clusters: HyperPod cluster ARN -> its settings in the template."""
        return {
            "seed": self.seed,
            "provisioning_delay_seconds": self.provisioning_seconds,
            "health_check_seconds": self.health_check_seconds,
            "rbac_dir": str(self.rbac_directory),
            "clusters": [
                {
                    "hyperpod_cluster_arn": arn,
                    "hyperpod_cluster_name": settings["hyperpod_cluster_name"],
                    "eks_cluster_name": settings["eks_cluster_name"],
                    "training_namespaces": settings["training_namespaces"],
                    "node_recovery": self.node_recovery,
                    "instance_groups": [
                        {
                            "name": self.instance_group,
                            "instance_type": self.instance_type,
                            "count": self.node_count,
                        }
                    ],
                }
                for arn, settings in clusters.items()
            ],
        }
