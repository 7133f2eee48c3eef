"""What an object must look like to be stored: names, taints, pods, and the schema of HyperPodPyTorchJob.

The custom resource's fields follow the CRD of the SageMaker HyperPod training operator, as far as its public examples
show them; unknown fields of the spec are kept, as the pod template carries any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from local_stack.cluster.kubernetes.errors import invalid
from local_stack.cluster.kubernetes.resources import Resource

Cause = dict[str, str]

_DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_DNS_SUBDOMAIN = re.compile(r"^(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_QUALIFIED_NAME = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def _cause(field: str, message: str, reason: str = "FieldValueInvalid") -> Cause:
    return {"reason": reason, "message": message, "field": field}


def _wrong(field: str, value: Any, why: str) -> Cause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return _cause(field, f"Invalid value: {shown}: {why}")


def _required(field: str) -> Cause:
    return _cause(field, "Required value", "FieldValueRequired")


def _wrong_type(field: str, value: Any, expected: str) -> Cause:
    actual = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    found = actual.get(type(value), "null")
    return _cause(
        field,
        f'Invalid value: "{found}": {field} in body must be of type {expected}: "{found}"',
        "FieldValueTypeInvalid",
    )


def _metadata(body: Mapping[str, Any]) -> Iterator[Cause]:
    metadata = body["metadata"]
    name = metadata.get("name", "")
    if not name:
        yield _cause("metadata.name", "Required value: name or generateName is required", "FieldValueRequired")
    elif not _DNS_SUBDOMAIN.match(name):
        yield _wrong(
            "metadata.name",
            name,
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
            "start and end with an alphanumeric character",
        )
    for key, value in (metadata.get("labels") or {}).items():
        if not _QUALIFIED_NAME.match(key):
            yield _wrong("metadata.labels", key, "name part must consist of alphanumeric characters, '-', '_' or '.'")
        if not isinstance(value, str) or not _LABEL_VALUE.match(value):
            yield _wrong("metadata.labels", value, "a valid label must be an empty string or at most 63 alphanumerics")
    for key, value in (metadata.get("annotations") or {}).items():
        if not _QUALIFIED_NAME.match(key):
            yield _wrong("metadata.annotations", key, "name part must consist of alphanumeric characters")
        if not isinstance(value, str):
            yield _wrong_type("metadata.annotations", value, "string")


def _node(body: Mapping[str, Any]) -> Iterator[Cause]:
    seen: set[tuple[str, str]] = set()
    for index, taint in enumerate((body.get("spec") or {}).get("taints") or []):
        field = f"spec.taints[{index}]"
        key, effect = taint.get("key", ""), taint.get("effect", "")
        if not _QUALIFIED_NAME.match(key):
            yield _wrong(f"{field}.key", key, "name part must be non-empty")
        if not _LABEL_VALUE.match(taint.get("value") or ""):
            yield _wrong(f"{field}.value", taint["value"], "a valid label must be an empty string or alphanumeric")
        if effect not in _EFFECTS:
            supported = ", ".join(f'"{name}"' for name in _EFFECTS)
            yield _cause(
                f"{field}.effect",
                f'Unsupported value: "{effect}": supported values: {supported}',
                "FieldValueNotSupported",
            )
        if (key, effect) in seen:
            yield _cause(
                f"{field}", f"Duplicate value: taints must be unique by key and effect pair ({key}:{effect})",
                "FieldValueDuplicate",
            )  # fmt: skip
        seen.add((key, effect))


def _pod_spec(spec: Any, field: str) -> Iterator[Cause]:
    if not isinstance(spec, dict):
        yield _required(field)
        return
    containers = spec.get("containers")
    if not isinstance(containers, list) or not containers:
        yield _required(f"{field}.containers")
        return
    yield from _node_affinity(spec, field)
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    for index, container in enumerate(containers):
        where = f"{field}.containers[{index}]"
        if not _DNS_LABEL.match(container.get("name") or ""):
            yield _required(f"{where}.name")
        for position, variable in enumerate(container.get("env") or []):
            if not variable.get("name"):
                yield _required(f"{where}.env[{position}].name")
            if not isinstance(variable.get("value", ""), str):
                yield _wrong_type(f"{where}.env[{position}].value", variable["value"], "string")
        for position, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in volumes:
                yield _cause(
                    f"{where}.volumeMounts[{position}].name", f'Not found: "{mount.get("name")}"', "FieldValueNotFound"
                )


def _node_affinity(spec: Mapping[str, Any], field: str) -> Iterator[Cause]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for number, term in enumerate(required.get("nodeSelectorTerms") or []):
        for index, each in enumerate(term.get("matchFields") or []):
            if len(each.get("values") or []) != 1:
                where = f"{field}.affinity.nodeAffinity.nodeSelectorTerms[{number}].matchFields[{index}].values"
                yield _cause(where, "must be only one value when `operator` is 'In' or 'NotIn' for node field selector")


def _pod(body: Mapping[str, Any]) -> Iterator[Cause]:
    yield from _pod_spec(body.get("spec"), "spec")


def _config_map(body: Mapping[str, Any]) -> Iterator[Cause]:
    for key, value in (body.get("data") or {}).items():
        if not isinstance(value, str):
            yield _wrong_type(f"data.{key}", value, "string")


def _run_policy(policy: Any) -> Iterator[Cause]:
    if not isinstance(policy, dict):
        yield _wrong_type("spec.runPolicy", policy, "object")
        return
    if "suspend" in policy and not isinstance(policy["suspend"], bool):
        yield _wrong_type("spec.runPolicy.suspend", policy["suspend"], "boolean")
    retries = policy.get("jobMaxRetryCount")
    if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
        yield _wrong_type("spec.runPolicy.jobMaxRetryCount", retries, "integer")
    clean = policy.get("cleanPodPolicy", "All")
    if clean not in ("All", "OnlyComplete", "None"):
        yield _cause(
            "spec.runPolicy.cleanPodPolicy",
            f'Unsupported value: "{clean}": supported values: "All", "OnlyComplete", "None"',
            "FieldValueNotSupported",
        )


def _hyperpod_pytorch_job(body: Mapping[str, Any]) -> Iterator[Cause]:
    spec = body.get("spec")
    if not isinstance(spec, dict):
        yield _required("spec")
        return
    processes = spec.get("nprocPerNode", "auto")
    if not isinstance(processes, str):
        yield _wrong_type("spec.nprocPerNode", processes, "string")
    elif processes not in ("auto", "1"):
        yield _wrong("spec.nprocPerNode", processes, "the local cluster runs one process a pod: write auto or 1")
    replicas = spec.get("replicaSpecs")
    if not isinstance(replicas, list) or not replicas:
        yield _required("spec.replicaSpecs")
        return
    for index, replica in enumerate(replicas):
        where = f"spec.replicaSpecs[{index}]"
        if not isinstance(replica, dict):
            yield _wrong_type(where, replica, "object")
            continue
        if not _DNS_LABEL.match(str(replica.get("name", ""))):
            yield _required(f"{where}.name")
        count = replica.get("replicas", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            yield _wrong_type(f"{where}.replicas", count, "integer")
        yield from _pod_spec((replica.get("template") or {}).get("spec"), f"{where}.template.spec")
    if "runPolicy" in spec:
        yield from _run_policy(spec["runPolicy"])


_CHECKS: dict[str, Callable[[Mapping[str, Any]], Iterator[Cause]]] = {
    "Node": _node,
    "Pod": _pod,
    "ConfigMap": _config_map,
    "HyperPodPyTorchJob": _hyperpod_pytorch_job,
}


def validate(resource: Resource, body: Mapping[str, Any]) -> None:
    """Raise 422 with one cause a broken rule; return where the object may be stored."""
    causes = list(_metadata(body))
    if check := _CHECKS.get(resource.kind):
        causes.extend(check(body))
    if causes:
        raise invalid(resource.kind, resource.group, body["metadata"].get("name", ""), causes)
