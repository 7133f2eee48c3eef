"""The three patch formats: JSON patch (RFC 6902), JSON merge patch (RFC 7386), strategic merge patch."""

from __future__ import annotations

import copy
from typing import Any

from local_stack.cluster.kubernetes.errors import bad_request, unpatchable

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

_MERGE_KEYS = {
    "addresses": "type",
    "conditions": "type",
    "containers": "name",
    "containerStatuses": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists of objects that merge by key. Every other list (taints, tolerations, args) is replaced as a whole."""
_MERGED_SCALAR_LISTS = frozenset({"finalizers"})


def _steps(pointer: Any) -> list[str]:
    if not isinstance(pointer, str) or (pointer and not pointer.startswith("/")):
        raise bad_request(f"JSON patch path {pointer!r} must be empty or start with '/'")
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _index(container: list[Any], step: str, *, inserting: bool) -> int:
    if inserting and step == "-":
        return len(container)
    if not step.isdigit() or int(step) > len(container) - (0 if inserting else 1):
        raise unpatchable()
    return int(step)


def _child(container: Any, step: str) -> Any:
    if isinstance(container, list):
        return container[_index(container, step, inserting=False)]
    if isinstance(container, dict) and step in container:
        return container[step]
    raise unpatchable()


def _lookup(document: Any, pointer: Any) -> Any:
    for step in _steps(pointer):
        document = _child(document, step)
    return document


def _set(document: Any, pointer: Any, value: Any, *, must_exist: bool) -> Any:
    steps = _steps(pointer)
    if not steps:
        return value
    parent = document
    for step in steps[:-1]:
        parent = _child(parent, step)
    last = steps[-1]
    if must_exist:
        _child(parent, last)
    if isinstance(parent, list):
        position = _index(parent, last, inserting=not must_exist)
        if must_exist:
            parent[position] = value
        else:
            parent.insert(position, value)
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise unpatchable()
    return document


def _remove(document: Any, pointer: Any) -> Any:
    steps = _steps(pointer)
    if not steps:
        raise unpatchable()
    parent = document
    for step in steps[:-1]:
        parent = _child(parent, step)
    _child(parent, steps[-1])
    del parent[int(steps[-1]) if isinstance(parent, list) else steps[-1]]
    return document


def apply_json_patch(document: Any, operations: Any) -> Any:
    """The document after all operations, or 422 as soon as one (a `test` too) does not apply: all or nothing."""
    if not isinstance(operations, list) or not all(isinstance(operation, dict) for operation in operations):
        raise bad_request("a JSON patch is a list of operations {op, path, value}")
    document = copy.deepcopy(document)
    for operation in operations:
        path = operation.get("path")
        match operation.get("op"):
            case "add":
                document = _set(document, path, copy.deepcopy(operation.get("value")), must_exist=False)
            case "replace":
                document = _set(document, path, copy.deepcopy(operation.get("value")), must_exist=True)
            case "remove":
                document = _remove(document, path)
            case "test":
                if _lookup(document, path) != operation.get("value"):
                    raise unpatchable()
            case "copy":
                document = _set(
                    document, path, copy.deepcopy(_lookup(document, operation.get("from"))), must_exist=False
                )
            case "move":
                value = _lookup(document, operation.get("from"))
                document = _set(_remove(document, operation.get("from")), path, value, must_exist=False)
            case unknown:
                raise bad_request(
                    f"JSON patch operation {unknown!r} is not one of add, remove, replace, test, move, copy"
                )
    return document


def apply_merge_patch(document: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, everything else (lists too) replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = apply_merge_patch(merged.get(key), value)
    return merged


def _merge_keyed_list(current: list[Any], patch: list[Any], key: str) -> list[Any]:
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [copy.deepcopy(item) for item in patch if item.get("$patch") != "replace"]
    merged = copy.deepcopy(current)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise bad_request(f"every item of this list needs its merge key {key!r}")
        position = next((index for index, old in enumerate(merged) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if position is not None:
                del merged[position]
        elif position is None:
            merged.append(apply_strategic_merge_patch({}, item))
        else:
            merged[position] = apply_strategic_merge_patch(merged[position], item)
    return merged


def apply_strategic_merge_patch(document: Any, patch: Any) -> Any:
    """As `apply_merge_patch`, but the lists that have a merge key merge by it; `$patch` directives are honoured."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != "$patch"}
    merged = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if key.startswith(("$setElementOrder/", "$retainKeys")):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            merged[name] = [item for item in merged.get(name) or [] if item not in value]
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            merged[key] = _merge_keyed_list(merged.get(key) or [], value, _MERGE_KEYS[key])
        elif isinstance(value, list) and key in _MERGED_SCALAR_LISTS:
            kept = merged.get(key) or []
            merged[key] = [*kept, *(item for item in value if item not in kept)]
        else:
            merged[key] = apply_strategic_merge_patch(merged.get(key), value)
    return merged
