"""What create, update and delete mean: generation, status, graceful deletion, finalizers, dry run, conflicts.

The HTTP layer and the controllers of this process both go through here, so nothing can write an object that a real API
server would refuse.
"""

from __future__ import annotations

import copy
import secrets
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from local_stack.cluster.kubernetes.errors import (
    already_exists,
    bad_request,
    conflict,
    invalid,
    not_found,
)
from local_stack.cluster.kubernetes.managed_fields import managed_fields
from local_stack.cluster.kubernetes.resources import NAMESPACES, NODES, PODS, Resource
from local_stack.cluster.kubernetes.schemas import validate
from local_stack.cluster.kubernetes.selectors import object_selector
from local_stack.cluster.kubernetes.store import Json, ObjectStore

NOT_READY_TAINT = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
CONTROLLERS = "kube-controller-manager"
"""Who writes where nobody says: a controller of this process."""
_DEFAULT_GRACE_SECONDS = 30
_SERVER_OWNED = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
    "managedFields",
)
_FINISHED_PHASES = ("Succeeded", "Failed")


def now_rfc3339(offset_seconds: float = 0.0) -> str:
    """The time in the API's format, whole seconds, `offset_seconds` from now."""
    return (datetime.now(UTC) + timedelta(seconds=offset_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _without_version(body: Mapping[str, Any]) -> Json:
    metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
    return {**body, "metadata": metadata}


class Registry:
    """Objects of one cluster, with the API's rules. Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.webhooks: list[Callable[[Resource, Json], None]] = []
        """Change new objects before they are checked and stored."""

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """The object, or 404."""
        body = self.store.get(resource, namespace, name)
        if body is None:
            raise not_found(resource.plural, resource.group, name)
        return body

    def find(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """The object, or None."""
        return self.store.get(resource, namespace, name)

    def select(
        self, resource: Resource, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> tuple[list[Json], int]:
        """Matching objects and the version they were read at."""
        matches = object_selector(resource, labels, fields)
        bodies, version = self.store.read_all(resource, namespace)
        return [body for body in bodies if matches(body)], version

    def create(
        self, resource: Resource, namespace: str, body: Json, *, manager: str = CONTROLLERS, dry_run: bool = False
    ) -> Json:
        """Store a new object. manager: who writes. Raises 400, 404 (namespace), 409, 422."""
        created = copy.deepcopy(body)
        created["apiVersion"], created["kind"] = resource.api_version, resource.kind
        metadata = created.setdefault("metadata", {})
        if resource.namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
        else:
            metadata.pop("namespace", None)
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        for key in _SERVER_OWNED:
            metadata.pop(key, None)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = now_rfc3339()
        if resource.counts_generation:
            metadata["generation"] = 1
        self._admit(resource, created)
        for change in self.webhooks:
            change(resource, created)
        validate(resource, created)
        _note_manager(resource, {}, created, manager)
        with self.store.transaction():
            if resource.namespaced and self.find(NAMESPACES, "", namespace) is None:
                raise not_found("namespaces", "", namespace)
            if self.store.get(resource, namespace, metadata["name"]) is not None:
                raise already_exists(resource.plural, resource.group, metadata["name"])
            return created if dry_run else self.store.put(resource, created)

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Json], Json],
        *,
        status: bool = False,
        binding: bool = False,
        manager: str = CONTROLLERS,
        dry_run: bool = False,
    ) -> Json:
        """Replace the object by `change(current)`; with `status`, only its status.

        What `change` returns carries the resourceVersion it was computed from: another than the current one is a 409,
        none is taken as "whatever is there". An update that changes nothing leaves the resourceVersion alone. The last
        finalizer's removal completes a deletion. `binding` lets the scheduler write a pod's nodeName. manager: who
        writes.
        """
        with self.store.transaction():
            current = self.get(resource, namespace, name)
            wanted = change(copy.deepcopy(current))
            self._check_identity(resource, current, wanted)
            if status:
                metadata = {**current["metadata"], "resourceVersion": current["metadata"]["resourceVersion"]}
                updated = {**current, "metadata": metadata}
                if "status" in wanted:
                    updated["status"] = wanted["status"]
                else:
                    updated.pop("status", None)
            else:
                updated = self._main_update(resource, current, wanted)
                validate(resource, updated)
                if resource is PODS and not binding:
                    _refuse_pod_spec_change(current, updated)
            if _without_version(updated) == _without_version(current):
                return current
            _note_manager(resource, current, updated, manager)
            if dry_run:
                return updated
            if self._deletion_complete(updated):
                return self.store.remove(resource, namespace, name) or updated
            return self.store.put(resource, updated)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        grace_seconds: int | None = None,
        uid: str | None = None,
        version: str | None = None,
        dry_run: bool = False,
    ) -> tuple[Json, bool]:
        """Delete, or begin to. Returns the object's last state and whether it is gone.

        A scheduled, unfinished pod gets a deletionTimestamp and stays until its kubelet deletes it with grace 0; an
        object with finalizers stays until they are cleared. Raises 404, and 409 where `uid` or `version` differ.
        """
        with self.store.transaction():
            current = self.get(resource, namespace, name)
            metadata = current["metadata"]
            if uid is not None and uid != metadata["uid"]:
                why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
                raise conflict(resource.plural, resource.group, name, why)
            if version is not None and version != metadata["resourceVersion"]:
                raise conflict(resource.plural, resource.group, name, "Precondition failed: resourceVersion differs")
            grace = self._grace(resource, current, grace_seconds)
            if dry_run:
                return current, False
            if grace > 0 or metadata.get("finalizers"):
                return self._begin_deletion(resource, current, grace), False
            return self.store.remove(resource, namespace, name) or current, True

    def _begin_deletion(self, resource: Resource, current: Json, grace: int) -> Json:
        metadata = current["metadata"]
        if "deletionTimestamp" in metadata and metadata.get("deletionGracePeriodSeconds", 0) <= grace:
            return current
        marked = {
            **metadata,
            "deletionTimestamp": now_rfc3339(grace),
            "deletionGracePeriodSeconds": grace,
        }
        return self.store.put(resource, {**current, "metadata": marked})

    @staticmethod
    def _grace(resource: Resource, current: Json, asked: int | None) -> int:
        if resource is not PODS:
            return 0
        spec, phase = current.get("spec") or {}, (current.get("status") or {}).get("phase")
        if not spec.get("nodeName") or phase in _FINISHED_PHASES:
            return 0
        if asked is not None:
            return max(0, asked)
        return int(spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS))

    @staticmethod
    def _deletion_complete(body: Json) -> bool:
        metadata = body["metadata"]
        return (
            "deletionTimestamp" in metadata
            and not metadata.get("finalizers")
            and not metadata.get("deletionGracePeriodSeconds")
        )

    @staticmethod
    def _admit(resource: Resource, body: Json) -> None:
        """Defaults and admission of a new object."""
        if resource is NODES:
            taints = body.setdefault("spec", {}).setdefault("taints", [])
            if NOT_READY_TAINT not in taints:
                taints.append(dict(NOT_READY_TAINT))
        elif resource is PODS:
            body["status"] = {"phase": "Pending"}
            spec = body.get("spec")
            if isinstance(spec, dict):
                spec.setdefault("restartPolicy", "Always")
                spec.setdefault("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
                spec.setdefault("schedulerName", "default-scheduler")
        elif resource is NAMESPACES:
            body["status"] = {"phase": "Active"}
        elif resource.custom:
            body.pop("status", None)

    @staticmethod
    def _check_identity(resource: Resource, current: Json, wanted: Json) -> None:
        name = current["metadata"]["name"]
        metadata = wanted.get("metadata") or {}
        if metadata.get("name", name) != name:
            raise bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        namespace = current["metadata"].get("namespace")
        if metadata.get("namespace") not in (None, "", namespace):
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if wanted.get("kind", resource.kind) != resource.kind:
            raise bad_request(f"the object provided is a {wanted['kind']}, but this path serves {resource.kind}")
        version = metadata.get("resourceVersion")
        if not version and resource.custom:
            cause = {
                "reason": "FieldValueInvalid",
                "message": "Invalid value: 0x0: must be specified for an update",
                "field": "metadata.resourceVersion",
            }
            raise invalid(resource.plural, resource.group, name, [cause])
        if version and version != current["metadata"]["resourceVersion"]:
            raise conflict(resource.plural, resource.group, name)
        if metadata.get("uid") not in (None, "", current["metadata"]["uid"]):
            why = f"Precondition failed: UID in precondition: {metadata['uid']}"
            raise conflict(resource.plural, resource.group, name, why)

    @staticmethod
    def _main_update(resource: Resource, current: Json, wanted: Json) -> Json:
        updated = {**wanted, "apiVersion": resource.api_version, "kind": resource.kind}
        kept = {key: current["metadata"][key] for key in _SERVER_OWNED if key in current["metadata"]}
        metadata = {key: value for key, value in (wanted.get("metadata") or {}).items() if key not in _SERVER_OWNED}
        metadata["name"] = current["metadata"]["name"]
        if resource.namespaced:
            metadata["namespace"] = current["metadata"]["namespace"]
        metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
        updated["metadata"] = {**metadata, **kept}
        if resource.has_status:
            updated.pop("status", None)
            if "status" in current:
                updated["status"] = current["status"]
        if resource.counts_generation and updated.get("spec") != current.get("spec"):
            updated["metadata"]["generation"] = current["metadata"]["generation"] + 1
        return updated


def _note_manager(resource: Resource, before: Json, after: Json, manager: str) -> None:
    """Keep who set which field; of nodes alone, whose cordon several people and programs set and take off."""
    if resource is NODES:
        after["metadata"]["managedFields"] = managed_fields(before, after, manager=manager, at=now_rfc3339())


def _refuse_pod_spec_change(current: Json, updated: Json) -> None:
    """A pod's spec is fixed but for images and added tolerations; labels and annotations are free."""

    def fixed(body: Json) -> Json:
        spec = {
            key: value for key, value in body["spec"].items() if key not in ("tolerations", "activeDeadlineSeconds")
        }
        spec["containers"] = [{**container, "image": ""} for container in spec["containers"]]
        return spec

    old = current["spec"].get("tolerations") or []
    new = updated["spec"].get("tolerations") or []
    if fixed(current) == fixed(updated) and all(toleration in new for toleration in old):
        return
    cause = {
        "reason": "FieldValueForbidden",
        "message": "Forbidden: pod updates may not change fields other than `spec.containers[*].image` and "
        "additions to `spec.tolerations`",
        "field": "spec",
    }
    raise invalid("Pod", "", current["metadata"]["name"], [cause])
