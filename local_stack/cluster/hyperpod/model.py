"""The state of one HyperPod cluster: its instances, and what replacing, rebooting and checking does to them.

HyperPodError: a refused operation
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from local_stack.cluster.config import ClusterConfig, Config, ConfigError
from local_stack.cluster.hyperpod.instances import (
    HealthCheckOutcome,
    Instance,
    load_instances,
    new_instance,
    save_instances,
)
from local_stack.cluster.hyperpod.nodes import HyperPodNodes

logger = logging.getLogger(__name__)


class HyperPodError(Exception):
    """A refused operation, with the code that the AWS error carries."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class HyperPodCluster:
    """Instances of one cluster. Thread-safe; what takes time happens on timers and survives a restart of the server.

    on_change: called after an instance changed in a way that its node does not show (a fault, say).
    """

    def __init__(
        self,
        config: ClusterConfig,
        settings: Config,
        nodes: HyperPodNodes,
        path: Path,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.creation_time = time.time()
        self._settings = settings
        self._nodes = nodes
        self._path = path
        self._on_change = on_change
        self._lock = threading.RLock()
        self._timers: set[threading.Timer] = set()
        self._closed = False
        self._check_in_progress: set[str] = set()
        self._instances: dict[str, Instance] = {}

    def start(self) -> None:
        """Bring up the instances: those of the state directory, or new ones that are there at once.

        Raises ConfigError where the state directory holds other instances than the configuration asks for.
        """
        with self._lock:
            known = load_instances(self._path)
            if known is not None:
                self._check_counts(known)
            else:
                known = [
                    dataclasses.replace(
                        new_instance(
                            self.config, group, slot, 0, seed=self._settings.seed, launch_time=self.creation_time
                        ),
                        status="Running",
                    )
                    for group in self.config.instance_groups
                    for slot in range(group.count)
                ]
            self._instances = {instance.instance_id: instance for instance in known}
            self._save()
            for instance in known:
                if instance.status == "Pending":
                    self._after(self._settings.provisioning_delay_seconds, partial(self._join, instance))
                else:
                    # A check or reboot of an earlier server ended with it.
                    if instance.status in ("DeepHealthCheckInProgress", "SystemUpdating"):
                        self._put(dataclasses.replace(instance, status="Running"))
                    self._nodes.join(instance)

    def _check_counts(self, known: Sequence[Instance]) -> None:
        kept = Counter(instance.instance_group for instance in known)
        configured = {group.name: group.count for group in self.config.instance_groups}
        if dict(kept) != {name: count for name, count in configured.items() if count}:
            raise ConfigError(
                f"{self._path} holds instances {dict(kept)}, the configuration asks for {configured}: "
                "use another state directory, or the configuration that it was made with"
            )

    def close(self) -> None:
        """Cancel what is under way."""
        with self._lock:
            self._closed = True
            for timer in self._timers:
                timer.cancel()

    def instances(self) -> list[Instance]:
        """All instances, by group and logical id."""
        with self._lock:
            return sorted(self._instances.values(), key=lambda item: (item.instance_group, item.node_logical_id))

    def find(self, *, instance_id: str = "", node_name: str = "", node_logical_id: str = "") -> Instance | None:
        """The instance with that id, node name or logical id."""
        for instance in self.instances():
            if instance_id and instance.instance_id == instance_id:
                return instance
            if node_name and instance.node_name == node_name:
                return instance
            if node_logical_id and instance.node_logical_id == node_logical_id:
                return instance
        return None

    def set_fault(self, instance_id: str, fault: Any) -> None:
        """Put a fault on the instance's simulated hardware (None heals it); pods that start later suffer it."""
        with self._lock:
            self._put(dataclasses.replace(self._instances[instance_id], fault=fault))
        self._on_change()

    def set_health_check_outcome(self, instance_id: str, outcome: HealthCheckOutcome) -> None:
        """Decide what the next health check of the instance finds."""
        with self._lock:
            self._put(dataclasses.replace(self._instances[instance_id], health_check_outcome=outcome))

    def lose_power(self, instance: Instance) -> None:
        """Its processes are gone, and nobody says so: its pods stay as they were last seen until it is replaced."""
        self._nodes.lose_power(instance)

    def replace(self, instance: Instance) -> Instance:
        """Terminate the instance and start another in its place; returns the new one, still Pending.

        Raises HyperPodError with a code of BatchReplaceClusterNodes.
        """
        with self._lock:
            current = self._current(instance)
            if current.status not in ("Running", "Failure", "DeepHealthCheckInProgress"):
                raise HyperPodError(
                    "InvalidInstanceStatus", f"instance {current.instance_id} is {current.status}; wait until it runs"
                )
            group = next(group for group in self.config.instance_groups if group.name == current.instance_group)
            slot = int(current.node_logical_id.rpartition("-")[2]) - 1
            successor = new_instance(
                self.config, group, slot, current.incarnation + 1, seed=self._settings.seed, launch_time=time.time()
            )
            del self._instances[current.instance_id]
            self._check_in_progress.discard(current.instance_id)
            self._put(successor)
            self._nodes.leave(current)
            self._after(self._settings.provisioning_delay_seconds, lambda: self._join(successor))
        return successor

    def reboot(self, instance: Instance) -> None:
        """Stop the instance's node and bring it back: same identity, same hardware, same fault."""
        with self._lock:
            current = self._current(instance)
            if current.status not in ("Running", "Failure"):
                raise HyperPodError(
                    "InvalidInstanceStatus", f"instance {current.instance_id} is {current.status}; wait until it runs"
                )
            self._put(dataclasses.replace(current, status="SystemUpdating"))
            self._nodes.stop(current)
            self._after(self._settings.reboot_seconds, lambda: self._join(current))

    def start_health_check(self, instances: Sequence[Instance]) -> None:
        """Check the instances for the configured time. One request a cluster at a time. Raises HyperPodError."""
        with self._lock:
            if self._check_in_progress:
                raise HyperPodError(
                    "ConflictException", "a health check is in progress in this cluster; wait until it has ended"
                )
            chosen = [self._current(instance) for instance in instances]
            for instance in chosen:
                if instance.status != "Running":
                    raise HyperPodError(
                        "ValidationException",
                        f"instance {instance.instance_id} is {instance.status}; only a running one can be checked",
                    )
            for instance in chosen:
                if instance.health_check_outcome == "skipped":
                    continue
                self._check_in_progress.add(instance.instance_id)
                self._put(dataclasses.replace(instance, status="DeepHealthCheckInProgress"))
                self._nodes.check_started(instance)
            identities = [instance.instance_id for instance in chosen]
            self._after(self._settings.health_check_seconds, lambda: self._end_check(identities))

    def _end_check(self, instance_ids: Sequence[str]) -> None:
        for instance_id in instance_ids:
            if instance_id not in self._check_in_progress:
                continue
            self._check_in_progress.discard(instance_id)
            instance = self._instances[instance_id]
            if instance.health_check_outcome == "passed":
                self._put(dataclasses.replace(instance, status="Running"))
                self._nodes.check_passed(instance)
                continue
            self._put(dataclasses.replace(instance, status="Failure"))
            self._nodes.check_failed(instance)
            if self.config.node_recovery == "Automatic":
                self.replace(self._instances[instance_id])

    def _join(self, instance: Instance) -> None:
        current = self._instances.get(instance.instance_id)
        if current is not None:
            self._put(dataclasses.replace(current, status="Running"))
            self._nodes.join(current)

    def _current(self, instance: Instance) -> Instance:
        current = self._instances.get(instance.instance_id)
        if current is None:
            raise HyperPodError("InstanceIdNotFound", f"instance {instance.instance_id} is not in the cluster")
        return current

    def _put(self, instance: Instance) -> None:
        self._instances[instance.instance_id] = instance
        self._save()

    def _save(self) -> None:
        save_instances(self._path, list(self._instances.values()))

    def _after(self, delay_seconds: float, action: Callable[[], None]) -> None:
        def fire() -> None:
            with self._lock:
                self._timers.discard(timer)
                if self._closed:
                    return
                try:
                    action()
                except Exception:
                    logger.exception("a delayed action of cluster %s failed", self.config.hyperpod_cluster_name)

        timer = threading.Timer(delay_seconds, fire)
        timer.daemon = True
        self._timers.add(timer)
        timer.start()
