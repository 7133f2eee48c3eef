"""Create what the synthesised templates describe, through the edge's API, in the order of their references."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_stack.access_keys import access_key_of_role
from local_stack.edge.configuration import FunctionConfiguration, HttpRoute
from local_stack.resources import CREATORS
from local_stack.resources.context import Created, DeploymentContext, Principal
from local_stack.resources.storage import make_bucket
from local_stack.template import Environment, Resolver, StackTemplate, TemplateError

# Resources that change what another one becomes, without the other one referring to them; created last.
_AMENDMENTS = ("AWS::Lambda::EventInvokeConfig",)
_CLUSTERS_VARIABLE = "TRUESTEP_CLUSTERS"


@dataclass(kw_only=True)
class Deployment:
    """What was created: outputs of the templates, functions, routes, roles, and the clusters that the settings name."""

    outputs: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, str] = field(default_factory=dict)
    """`<stack>/<logical id>` -> what Ref gives."""
    attributes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """`<stack>/<logical id>` -> what Fn::GetAtt gives."""
    functions: list[FunctionConfiguration] = field(default_factory=list)
    routes: list[HttpRoute] = field(default_factory=list)
    principals: list[Principal] = field(default_factory=list)

    @property
    def clusters(self) -> Mapping[str, Mapping[str, Any]]:
        """HyperPod cluster ARN -> its settings, as the functions are told."""
        return clusters_of(function.environment for function in self.functions)

    def edge_configuration(self) -> dict[str, Any]:
        """What the edge is to serve, for `PUT /local/configuration`."""
        return {
            "functions": [function.to_json() for function in self.functions],
            "routes": [
                {"api_id": route.api_id, "route_key": route.route_key, "function_name": route.function_name}
                for route in self.routes
            ],
        }

    def principals_document(self) -> dict[str, Any]:
        """Access key -> role and Kubernetes groups, for the cluster server's `POST /local/principals`."""
        return {
            access_key_of_role(principal.role_arn): {
                "role_arn": principal.role_arn,
                "groups": sorted({group for groups in principal.groups_by_cluster.values() for group in groups}),
            }
            for principal in self.principals
        }


def clusters_of(environments: Any) -> dict[str, Mapping[str, Any]]:
    """Collect the clusters that functions' environments name. Raises TemplateError where that is no JSON object."""
    clusters: dict[str, Mapping[str, Any]] = {}
    for environment in environments:
        try:
            clusters |= json.loads(environment.get(_CLUSTERS_VARIABLE, "{}"))
        except (ValueError, TypeError) as error:
            raise TemplateError(f"{_CLUSTERS_VARIABLE} of a function is no JSON object: {error}") from error
    return clusters


def deploy(
    stacks: list[StackTemplate],
    *,
    account_id: str,
    region: str,
    endpoint_url: str,
    client: Callable[[str], Any],
    host_layer: Path,
    on_resource: Callable[[str, str], None] | None = None,
) -> Deployment:
    """Create all stacks' resources. client: service name -> boto3 client of the edge, with an administrator's key.

    on_resource: told type and logical id of each resource as it is created. Raises TemplateError for what cannot be
    deployed locally, before anything of that stack is created.
    """
    deployment = Deployment()
    exports: dict[str, Any] = {}
    for stack in stacks:
        _check_types(stack)
        context = DeploymentContext(
            stack=stack,
            account_id=account_id,
            region=region,
            endpoint_url=endpoint_url,
            client=client,
            host_layer=host_layer,
        )
        run = _StackDeployment(context, exports, on_resource or (lambda _type, _id: None))
        run.create_all()
        deployment.outputs |= run.outputs()
        deployment.resources |= {f"{stack.name}/{name}": created.reference for name, created in run.created.items()}
        deployment.attributes |= {f"{stack.name}/{name}": created.attributes for name, created in run.created.items()}
        deployment.functions += [FunctionConfiguration.from_json(value) for value in context.functions.values()]
        deployment.routes += context.routes
        deployment.principals += context.principals.values()
    _create_checkpoint_buckets(deployment, client("s3"), region)
    return deployment


def _check_types(stack: StackTemplate) -> None:
    unknown = sorted({resource["Type"] for resource in stack.resources.values()} - CREATORS.keys())
    if unknown:
        raise TemplateError(
            f"stack {stack.name} has resource types that the local stack does not know: {', '.join(unknown)}. "
            "Add each to local_stack/resources: a creator, or a line in unmodelled.py if it has no local meaning"
        )


def _create_checkpoint_buckets(deployment: Deployment, s3: Any, region: str) -> None:
    """Checkpoint buckets belong to the clusters, not to the template; here they have to come from somewhere."""
    existing = {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}
    locations = [location for cluster in deployment.clusters.values() for location in cluster["checkpoint_buckets"]]
    wanted = {location.partition("/")[0] for location in locations}
    for bucket in sorted(wanted - existing):
        make_bucket(s3, bucket, region)


class _StackDeployment:
    """Creates one stack's resources, each after those it refers to or depends on."""

    def __init__(
        self, context: DeploymentContext, exports: dict[str, Any], on_resource: Callable[[str, str], None]
    ) -> None:
        self._context = context
        self._exports = exports
        self._on_resource = on_resource
        self.created: dict[str, Created] = {}
        self._in_progress: list[str] = []
        self._resolver = Resolver(
            context.stack,
            Environment(account_id=context.account_id, region=context.region),
            reference=lambda logical_id: self._create(logical_id).reference,
            attribute=self._attribute,
            imported=self._import,
        )

    def create_all(self) -> None:
        """Create every resource whose condition holds."""
        last = [name for name, resource in self._context.stack.resources.items() if resource["Type"] in _AMENDMENTS]
        first = [name for name in self._context.stack.resources if name not in last]
        for logical_id in (*first, *last):
            condition = self._context.stack.resources[logical_id].get("Condition")
            if condition is None or self._resolver.condition(condition):
                self._create(logical_id)

    def outputs(self) -> dict[str, Any]:
        """Resolve the outputs, and note those that other stacks may import."""
        resolved = {}
        for name, output in self._context.stack.template.get("Outputs", {}).items():
            resolved[name] = self._resolver.resolve(output["Value"])
            if "Export" in output:
                self._exports[self._resolver.resolve(output["Export"]["Name"])] = resolved[name]
        return resolved

    def _create(self, logical_id: str) -> Created:
        if logical_id in self.created:
            return self.created[logical_id]
        resource = self._context.stack.resources.get(logical_id)
        if resource is None:
            raise TemplateError(f"stack {self._context.stack.name} refers to {logical_id}, which it does not have")
        if logical_id in self._in_progress:
            cycle = " -> ".join([*self._in_progress, logical_id])
            raise TemplateError(f"stack {self._context.stack.name}: resources refer to each other in a circle: {cycle}")
        self._in_progress.append(logical_id)
        depends_on = resource.get("DependsOn", [])
        for dependency in [depends_on] if isinstance(depends_on, str) else depends_on:
            self._create(dependency)
        properties = self._resolver.resolve(resource.get("Properties", {}))
        self._on_resource(resource["Type"], logical_id)
        try:
            created = CREATORS[resource["Type"]](self._context, logical_id, properties)
        except KeyError as error:
            raise TemplateError(f"{logical_id} ({resource['Type']}): property {error} is missing") from error
        self._in_progress.remove(logical_id)
        self.created[logical_id] = created
        return created

    def _attribute(self, logical_id: str, attribute: str) -> Any:
        created = self._create(logical_id)
        if attribute not in created.attributes:
            known = ", ".join(created.attributes) or "none"
            raise TemplateError(f"{logical_id} has no attribute {attribute} here (known: {known})")
        return created.attributes[attribute]

    def _import(self, name: str) -> Any:
        if name not in self._exports:
            raise TemplateError(f"stack {self._context.stack.name} imports {name}, which no earlier stack exports")
        return self._exports[name]
