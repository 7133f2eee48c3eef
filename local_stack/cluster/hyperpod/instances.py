"""Instances: identities that a seed decides, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from local_stack.cluster.config import ClusterConfig, InstanceGroup

InstanceStatus = Literal["Pending", "Running", "SystemUpdating", "DeepHealthCheckInProgress", "Failure"]
HealthCheckOutcome = Literal["passed", "failed", "skipped"]
HEALTH_CHECK_OUTCOMES: tuple[HealthCheckOutcome, ...] = ("passed", "failed", "skipped")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance, alive or coming up; what replaces it is another one with the same logical id."""

    instance_id: str
    node_logical_id: str
    instance_group: str
    instance_type: str
    gpu_uuids: tuple[str, ...]
    launch_time: float
    """Seconds since the epoch."""
    status: InstanceStatus
    incarnation: int = 0
    """Instances that held this logical id before."""
    fault: Any = None
    """What the simulated hardware does wrong; ends with the instance."""
    health_check_outcome: HealthCheckOutcome = "passed"
    """What its next health check will find. By default it passes: such checks do not find silent corruption."""

    @property
    def node_name(self) -> str:
        """Name of its Kubernetes node."""
        return f"hyperpod-{self.instance_id}"


def new_instance(
    config: ClusterConfig, group: InstanceGroup, slot: int, incarnation: int, *, seed: int, launch_time: float
) -> Instance:
    """The instance that holds a slot of a group for the `incarnation`-th time. The arguments alone decide its ids."""
    generator = random.Random(f"{seed}:{config.hyperpod_cluster_name}:{group.name}:{slot}:{incarnation}")  # noqa: S311
    instance_id = f"i-{generator.getrandbits(68):017x}"
    gpus = tuple(f"GPU-{uuid.UUID(int=generator.getrandbits(128), version=4)}" for _ in range(group.gpus_per_instance))
    return Instance(
        instance_id=instance_id,
        node_logical_id=f"{group.name}-{slot + 1}",
        instance_group=group.name,
        instance_type=group.instance_type,
        gpu_uuids=gpus,
        launch_time=launch_time,
        status="Pending",
        incarnation=incarnation,
    )


def load_instances(path: Path) -> list[Instance] | None:
    """The instances in the file, or None where there is none yet."""
    if not path.exists():
        return None
    return [Instance(**{**entry, "gpu_uuids": tuple(entry["gpu_uuids"])}) for entry in json.loads(path.read_text())]


def save_instances(path: Path, instances: list[Instance]) -> None:
    """Replace the file in one step, so that a crash leaves the old or the new one."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps([dataclasses.asdict(instance) for instance in instances], indent=1))
    temporary.replace(path)
