"""Settings of the cluster server, read from a JSON file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLUSTER_ARN = re.compile(r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:cluster/[a-z0-9]{12}$")
_NODE_RECOVERY = ("Automatic", "None")


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it."""


@dataclass(frozen=True, kw_only=True)
class InstanceGroup:
    """Instances of one type."""

    name: str
    count: int
    instance_type: str = "ml.p5.48xlarge"
    gpus_per_instance: int = 1

    def __post_init__(self) -> None:
        if self.count < 0 or self.gpus_per_instance < 1:
            raise ConfigError(f"instance group {self.name}: count must be at least 0 and gpus_per_instance at least 1")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """One HyperPod cluster and the EKS cluster that orchestrates it."""

    hyperpod_cluster_name: str
    hyperpod_cluster_arn: str
    eks_cluster_name: str
    instance_groups: tuple[InstanceGroup, ...]
    training_namespaces: tuple[str, ...] = ()
    """Where the roles of `Config.rbac_dir` that belong to a namespace are applied."""
    node_recovery: str = "None"
    """`Automatic`: an instance that fails its health check is replaced without being asked."""

    def __post_init__(self) -> None:
        if not _CLUSTER_ARN.match(self.hyperpod_cluster_arn):
            raise ConfigError(
                f"hyperpod_cluster_arn {self.hyperpod_cluster_arn!r} must look like "
                "arn:aws:sagemaker:us-west-2:111122223333:cluster/<12 lower-case letters or digits>"
            )
        if self.node_recovery not in _NODE_RECOVERY:
            raise ConfigError(f"node_recovery {self.node_recovery!r} must be one of {', '.join(_NODE_RECOVERY)}")
        if not self.instance_groups:
            raise ConfigError(f"cluster {self.hyperpod_cluster_name}: give at least one instance group")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the server is told."""

    clusters: tuple[ClusterConfig, ...]
    seed: int = 0
    """Decides instance ids, GPU UUIDs and the order in which pods get ranks."""
    provisioning_delay_seconds: float = 2.0
    health_check_seconds: float = 2.0
    reboot_seconds: float = 1.0
    rbac_dir: str | None = None
    """Folder of the kustomizations `cluster` and `namespace`; None grants nothing but to administrators."""
    watch_history_limit: int = 10_000

    def __post_init__(self) -> None:
        if not self.clusters:
            raise ConfigError("clusters: give at least one")
        for name in ("provisioning_delay_seconds", "health_check_seconds", "reboot_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative")


def _build(kind: type[Any], document: Any, where: str) -> Any:
    """Make a dataclass from a JSON object. Raises ConfigError for unknown, missing or ill-typed settings."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where} must be an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := set(document) - set(fields):
        raise ConfigError(f"{where}: unknown setting {', '.join(sorted(unknown))}; known: {', '.join(fields)}")
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if missing := required - set(document):
        raise ConfigError(f"{where}: give {', '.join(sorted(missing))}")
    values = dict(document)
    elements = {"clusters": ClusterConfig, "instance_groups": InstanceGroup, "training_namespaces": None}
    for name in elements.keys() & values.keys():
        if not isinstance(values[name], list):
            raise ConfigError(f"{where}.{name} must be a list")
        element = elements[name]
        values[name] = tuple(
            item if element is None else _build(element, item, f"{where}.{name}[{index}]")
            for index, item in enumerate(values[name])
        )
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def parse_config(document: Any) -> Config:
    """The settings of a decoded JSON document. Raises ConfigError."""
    config: Config = _build(Config, document, "config")
    return config


def load_config(path: Path) -> Config:
    """The settings in the file. Raises ConfigError naming the setting that is wrong."""
    try:
        return parse_config(json.loads(path.read_text()))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
