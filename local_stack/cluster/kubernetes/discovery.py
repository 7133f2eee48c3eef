"""The documents by which kubectl and other clients learn what is served."""

from __future__ import annotations

from typing import Any

from local_stack.cluster.kubernetes.resources import RESOURCES, Resource

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SUBRESOURCE_VERBS = {
    "status": ["get", "patch", "update"],
    "log": ["get"],
    "binding": ["create"],
    "eviction": ["create"],
}
_SUBRESOURCE_KINDS = {"binding": "Binding", "eviction": "Eviction"}
_SUBRESOURCE_GROUPS = {"eviction": {"group": "policy", "version": "v1"}}


def _entries(resource: Resource) -> list[dict[str, Any]]:
    main: dict[str, Any] = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
    }
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    entries = [main]
    entries.extend(
        {
            "name": f"{resource.plural}/{subresource}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": _SUBRESOURCE_KINDS.get(subresource, resource.kind),
            **_SUBRESOURCE_GROUPS.get(subresource, {}),
            "verbs": _SUBRESOURCE_VERBS[subresource],
        }
        for subresource in resource.subresources
    )
    return entries


def _group(name: str) -> dict[str, Any]:
    versions = sorted({resource.version for resource in RESOURCES if resource.group == name})
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _openapi_paths() -> set[str]:
    return {_openapi_path(resource) for resource in RESOURCES}


def _openapi_path(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"


def _openapi(path: str) -> dict[str, Any] | None:
    """As much as kubectl needs to leave validation to the server: that PATCH takes `fieldValidation`."""
    if path not in _openapi_paths():
        return None
    paths, schemas = {}, {}
    for resource in RESOURCES:
        if _openapi_path(resource) != path:
            continue
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        scope = "namespaces/{namespace}/" if resource.namespaced else ""
        operation = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": kind,
        }
        paths[f"/{path}/{scope}{resource.plural}/{{name}}"] = {"patch": operation}
        schemas[resource.kind] = {"type": "object", "x-kubernetes-group-version-kind": [kind]}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.33.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def discover(path: str) -> dict[str, Any] | None:
    """The discovery document at that path, or None."""
    groups = sorted({resource.group for resource in RESOURCES} - {""})
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": "33", "gitVersion": "v1.33.0-truestep", "platform": "linux/amd64"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]}
        case ["apis", name] if name in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(name)}
        case ["openapi", "v3"]:
            return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in sorted(_openapi_paths())}}
        case ["openapi", "v3", *rest]:
            return _openapi("/".join(rest))
        case ["api", version]:
            group_version, group = version, ""
        case ["apis", group, version]:
            group_version = f"{group}/{version}"
        case _:
            return None
    entries = [
        entry
        for resource in RESOURCES
        if resource.group == group and resource.api_version == group_version
        for entry in _entries(resource)
    ]
    if not entries:
        return None
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": entries}
