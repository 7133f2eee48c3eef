"""What the creators of resources share: clients, names, and what they hand to the edge and the cluster server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_stack.edge.configuration import HttpRoute
from local_stack.template import StackTemplate

Properties = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Created:
    """A resource that exists: what `Ref` and `Fn::GetAtt` give."""

    reference: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Principal:
    """A role as the cluster knows it: Kubernetes groups by EKS cluster."""

    role_arn: str
    groups_by_cluster: dict[str, list[str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class DeploymentContext:
    """One deployment on its way. Creators add functions (constructor arguments by name), routes and principals."""

    stack: StackTemplate
    account_id: str
    region: str
    endpoint_url: str
    client: Callable[[str], Any]
    host_layer: Path
    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    routes: list[HttpRoute] = field(default_factory=list)
    integrations: dict[str, str] = field(default_factory=dict)
    """API integration id -> function name."""
    principals: dict[str, Principal] = field(default_factory=dict)
    """Role ARN -> principal."""

    def arn(self, service: str, resource: str) -> str:
        """ARN in this account and region."""
        return f"arn:aws:{service}:{self.region}:{self.account_id}:{resource}"

    def global_arn(self, service: str, resource: str) -> str:
        """ARN of a service without regions."""
        return f"arn:aws:{service}::{self.account_id}:{resource}"

    def physical_name(self, logical_id: str, *, limit: int = 64) -> str:
        """`<stack>-<logical id>`, as CloudFormation names things, shortened to `limit` characters where it must be."""
        name = f"{self.stack.name}-{logical_id}"
        if len(name) <= limit:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name[: limit - 9]}-{digest}"


Creator = Callable[[DeploymentContext, str, Properties], Created]
"""(context, logical id, resolved properties) -> the resource."""


def pick(properties: Properties, *names: str) -> dict[str, Any]:
    """Return the named properties that are present, for APIs whose members have the template's names."""
    return {name: properties[name] for name in names if name in properties}
