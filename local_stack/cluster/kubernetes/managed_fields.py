"""Who set which field of an object: ``metadata.managedFields``, as the API server keeps it of every write. Pure.

Of an update the changed fields become the writer's and nobody else's, and removed ones nobody's. Lists are one field,
as a node's taints are; fields of ``status`` are not followed.
Source: Kubernetes documentation, "Server-Side Apply", section "Field management".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from local_stack.cluster.kubernetes.store import Json

_Path = tuple[str, ...]
_FOLLOWED = (("spec",), ("metadata", "labels"), ("metadata", "annotations"))


def managed_fields(before: Json, after: Json, *, manager: str, at: str) -> list[Json]:
    """The entries after `manager` has changed the object. before: empty for a new one. at: RFC 3339."""
    entries = (before.get("metadata") or {}).get("managedFields") or []
    owned = {entry["manager"]: set(_paths(entry["fieldsV1"])) for entry in entries}
    times = {entry["manager"]: entry["time"] for entry in entries}
    old, new = dict(_leaves(before)), dict(_leaves(after))
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    owned = {name: paths - changed - (old.keys() - new.keys()) for name, paths in owned.items()}
    if changed:
        owned[manager] = owned.get(manager, set()) | changed
        times[manager] = at
    return [_entry(name, owned[name], after["apiVersion"], times[name]) for name in sorted(owned) if owned[name]]


def _entry(manager: str, paths: Iterable[_Path], api_version: str, at: str) -> Json:
    fields: Json = {}
    for path in sorted(paths):
        inner = fields
        for name in path:
            inner = inner.setdefault(f"f:{name}", {})
    return {
        "manager": manager,
        "operation": "Update",
        "apiVersion": api_version,
        "time": at,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }


def _paths(fields: Mapping[str, Any], path: _Path = ()) -> Iterator[_Path]:
    for name, inner in fields.items():
        below = (*path, name.removeprefix("f:"))
        if inner:
            yield from _paths(inner, below)
        else:
            yield below


def _leaves(body: Json) -> Iterator[tuple[_Path, Any]]:
    for root in _FOLLOWED:
        value: Any = body
        for name in root:
            value = (value or {}).get(name)
        yield from _below(value, root)


def _below(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _below(inner, (*path, name))
    elif value is not None:
        yield path, value
