"""Functions, the state machine, the HTTP API, and the roles that functions run with."""

from __future__ import annotations

import json
from typing import Any

from local_stack.access_keys import access_key_of_role
from local_stack.edge.configuration import HttpRoute
from local_stack.resources.context import Created, Creator, DeploymentContext, Principal, Properties
from local_stack.template import TemplateError


def create_role(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Note a role: nothing is enforced here, but every call made with it carries its access key."""
    name = properties.get("RoleName", context.physical_name(logical_id))
    arn = context.global_arn("iam", f"role/{name}")
    context.principals[arn] = Principal(role_arn=arn)
    return Created(reference=name, attributes={"Arn": arn, "RoleId": f"AROA{name.upper()[:16]}"})


def create_access_entry(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Give a role its Kubernetes groups on one cluster."""
    arn = properties["PrincipalArn"]
    principal = context.principals.setdefault(arn, Principal(role_arn=arn))
    groups = principal.groups_by_cluster.setdefault(properties["ClusterName"], [])
    groups += properties.get("KubernetesGroups", ())
    entry = f"access-entry/{properties['ClusterName']}/role/{logical_id}"
    return Created(reference=logical_id, attributes={"AccessEntryArn": context.arn("eks", entry)})


def create_layer(context: DeploymentContext, logical_id: str, _properties: Properties) -> Created:
    """Stand the host's layer in for the template's, whose wheels are for another platform."""
    if not (context.host_layer / "python").is_dir():
        raise TemplateError(
            f"{context.host_layer / 'python'} is missing: it holds the layer's dependencies, at the same versions, for "
            "this machine; make it with: python -m infra.wheelhouse"
        )
    return Created(reference=context.arn("lambda", f"layer:{logical_id}:1"))


def create_function(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Register a function with the edge: handler, environment and limits of the template, code of the staged asset."""
    name = properties.get("FunctionName", context.physical_name(logical_id))
    arn = context.arn("lambda", f"function:{name}")
    context.functions[name] = {
        "name": name,
        "arn": arn,
        "handler": properties["Handler"],
        "runtime": properties["Runtime"],
        "task_root": _task_root(context, logical_id, properties["Code"]),
        "access_key": access_key_of_role(properties["Role"]),
        "layer_paths": [str(context.host_layer / "python")] if properties.get("Layers") else [],
        "environment": {
            variable: str(value) for variable, value in properties.get("Environment", {}).get("Variables", {}).items()
        },
        "timeout_seconds": float(properties.get("Timeout", 3)),
        "memory_mebibytes": int(properties.get("MemorySize", 128)),
    }
    return Created(reference=name, attributes={"Arn": arn})


def _task_root(context: DeploymentContext, logical_id: str, code: dict[str, Any]) -> str:
    key = code.get("S3Key")
    path = context.stack.assets.get(key) if key else None
    if path is None or not path.is_dir():
        raise TemplateError(
            f"function {logical_id}: its code ({key or 'inline'}) is no staged asset directory of the assembly; "
            "package functions with Code.from_asset and synthesise again"
        )
    return str(path.resolve())


def configure_asynchronous_invocations(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Set retries and failure destination of a function's asynchronous events."""
    function = context.functions[_function_name(properties["FunctionName"])]
    function["maximum_retry_attempts"] = int(properties.get("MaximumRetryAttempts", 2))
    on_failure = properties.get("DestinationConfig", {}).get("OnFailure", {}).get("Destination")
    if on_failure and ":sqs:" not in on_failure:
        raise TemplateError(f"{logical_id}: only SQS failure destinations run locally, not {on_failure}")
    function["on_failure_arn"] = on_failure
    return Created(reference=logical_id)


def create_state_machine(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create a state machine; `${Name}` in its definition becomes the template's substitution."""
    name = properties.get("StateMachineName", context.physical_name(logical_id, limit=80))
    definition = properties.get("DefinitionString") or json.dumps(properties["Definition"])
    for substitution, value in properties.get("DefinitionSubstitutions", {}).items():
        definition = definition.replace("${" + substitution + "}", str(value))
    arn = context.client("stepfunctions").create_state_machine(
        name=name,
        definition=definition,
        roleArn=properties["RoleArn"],
        type=properties.get("StateMachineType", "STANDARD"),
    )["stateMachineArn"]
    return Created(reference=arn, attributes={"Arn": arn, "Name": name})


def create_api(context: DeploymentContext, logical_id: str, _properties: Properties) -> Created:
    """Serve an HTTP API at the edge's own address."""
    api_id = f"local{logical_id.lower()}"[:20]
    return Created(reference=api_id, attributes={"ApiId": api_id, "ApiEndpoint": context.endpoint_url})


def create_integration(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Note which function an integration calls."""
    context.integrations[logical_id] = _function_name(properties["IntegrationUri"])
    return Created(reference=logical_id)


def create_route(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Serve one route of the HTTP API."""
    integration = properties["Target"].removeprefix("integrations/")
    context.routes.append(
        HttpRoute(
            api_id=properties["ApiId"],
            route_key=properties["RouteKey"],
            function_name=context.integrations[integration],
        )
    )
    return Created(reference=logical_id)


def _function_name(name_or_arn: str) -> str:
    """Name out of a name, an ARN, or API Gateway's invocation URI."""
    arn = name_or_arn.split("/functions/")[-1].removesuffix("/invocations")
    return arn.split(":")[6] if arn.count(":") >= 6 else arn


CREATORS: dict[str, Creator] = {
    "AWS::IAM::Role": create_role,
    "AWS::EKS::AccessEntry": create_access_entry,
    "AWS::Lambda::LayerVersion": create_layer,
    "AWS::Lambda::Function": create_function,
    "AWS::Lambda::EventInvokeConfig": configure_asynchronous_invocations,
    "AWS::StepFunctions::StateMachine": create_state_machine,
    "AWS::ApiGatewayV2::Api": create_api,
    "AWS::ApiGatewayV2::Integration": create_integration,
    "AWS::ApiGatewayV2::Route": create_route,
}
