"""The documents by which kubectl and other clients learn what is served."""

from __future__ import annotations

from typing import Any

from local_stack.cluster.kubernetes.resources import RESOURCES, Resource

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SUBRESOURCE_VERBS = {"status": ["get", "patch", "update"], "log": ["get"], "binding": ["create"]}


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
            "kind": "Binding" if subresource == "binding" else resource.kind,
            "verbs": _SUBRESOURCE_VERBS[subresource],
        }
        for subresource in resource.subresources
    )
    return entries


def _group(name: str) -> dict[str, Any]:
    versions = sorted({resource.version for resource in RESOURCES if resource.group == name})
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


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
