"""The Kubernetes API over HTTP: paths and verbs, authentication and authorisation, bodies and patches."""

from __future__ import annotations

import base64
import binascii
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from local_stack.cluster.http_server import Request, Response, json_response
from local_stack.cluster.kubernetes import patch as patches
from local_stack.cluster.kubernetes.auth import Authenticator, Caller
from local_stack.cluster.kubernetes.discovery import discover
from local_stack.cluster.kubernetes.errors import (
    ApiError,
    bad_request,
    expired,
    no_such_path,
    unsupported_media_type,
)
from local_stack.cluster.kubernetes.rbac import REVIEWS, REVIEWS_PATH, Access, Authorizer
from local_stack.cluster.kubernetes.registry import Registry
from local_stack.cluster.kubernetes.request_record import RequestRecord
from local_stack.cluster.kubernetes.resources import NAMESPACES, PODS, Resource, find_resource
from local_stack.cluster.kubernetes.selectors import object_selector
from local_stack.cluster.kubernetes.store import Json
from local_stack.cluster.kubernetes.tables import as_table, wants_table
from local_stack.cluster.kubernetes.watch import watch

_PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    patches.JSON_PATCH: patches.apply_json_patch,
    patches.MERGE_PATCH: patches.apply_merge_patch,
    patches.STRATEGIC_MERGE_PATCH: patches.apply_strategic_merge_patch,
}


class PodLogs(Protocol):
    """Where the logs of pods are read from (the kubelet)."""

    def read_log(self, pod: Json, query: dict[str, str]) -> Response:
        """The log of the pod as the `/log` query asks."""


@dataclass(frozen=True)
class _Target:
    """What a path names."""

    resource: Resource
    namespace: str
    name: str
    subresource: str


def _resolve(path: str) -> _Target:
    """Read `/api/v1/...` and `/apis/<group>/<version>/...`. Raises 404 for anything that is not served."""
    match path.strip("/").split("/"):
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            raise no_such_path()
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and find_resource(group, version, rest[2]):
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        raise no_such_path()
    plural, name, subresource = (*rest, "", "")[:3]
    resource = find_resource(group, version, plural)
    if resource is None or (subresource and subresource not in resource.subresources):
        raise no_such_path()
    if bool(namespace) != resource.namespaced and (namespace or name):
        raise no_such_path()
    return _Target(resource, namespace, name, subresource)


def _verb(request: Request, target: _Target) -> str:
    by_method = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    if request.method in by_method:
        return by_method[request.method]
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if target.name:
        return "get"
    return "watch" if request.query.get("watch") in ("true", "1") else "list"


def _json_body(request: Request) -> Any:
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if content_type not in ("application/json", *_PATCHES):
        raise unsupported_media_type(["application/json"])
    try:
        return json.loads(request.body or b"{}")
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None


def _object_body(request: Request) -> Json:
    body = _json_body(request)
    if not isinstance(body, dict):
        raise bad_request("the body must be an object")
    return body


def _dry_run(request: Request, options: Json | None = None) -> bool:
    value = request.query.get("dryRun") or (options or {}).get("dryRun")
    if value in (None, "", []):
        return False
    if value in ("All", ["All"]):
        return True
    raise bad_request(f'dryRun: Unsupported value: {value!r}: supported values: "All"')


def _manager(request: Request) -> str:
    """Who writes, as the API server takes it: what the client calls itself, or else the start of its user agent."""
    return request.query.get("fieldManager") or request.headers.get("user-agent", "").partition("/")[0] or "unknown"


class KubernetesApi:
    """Answers the requests of one cluster."""

    def __init__(
        self,
        registry: Registry,
        authenticator: Authenticator,
        authorizer: Authorizer,
        logs: PodLogs,
        record: RequestRecord,
    ) -> None:
        self._registry = registry
        self._record = record
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._logs = logs

    def handle(self, request: Request) -> Response:
        """Answer, with a `Status` body for everything that is refused."""
        try:
            if request.path in ("/healthz", "/livez", "/readyz"):
                return Response(body=b"ok", content_type="text/plain")
            caller = self._authenticator.authenticate(request.headers.get("authorization", ""))
            document = discover(request.path) if request.method == "GET" else None
            if document is not None:
                return json_response(document)
            if (request.method, request.path) == ("POST", REVIEWS_PATH):
                self._permit(caller, REVIEWS)
                return json_response(self._authorizer.review(_object_body(request)), 201)
            target = _resolve(request.path)
            verb = _verb(request, target)
            resource = target.resource
            plural = f"{resource.plural}/{target.subresource}" if target.subresource else resource.plural
            access = Access(
                verb=verb, group=resource.group, resource=plural, namespace=target.namespace, name=target.name
            )
            self._permit(caller, access)
            return getattr(self, f"_{verb}")(request, target)  # type: ignore[no-any-return]
        except ApiError as error:
            return json_response(error.status(), error.code)

    def _permit(self, caller: Caller, access: Access) -> None:
        """Record what is asked for, and raise 403 where nothing grants it."""
        self._record.add(caller, access, allowed=self._authorizer.allowed(caller, access))
        self._authorizer.authorize(caller, access)

    def _get(self, request: Request, target: _Target) -> Response:
        body = self._registry.get(target.resource, target.namespace, target.name)
        if target.subresource == "log":
            return self._logs.read_log(body, dict(request.query))
        if wants_table(request.headers.get("accept", "")):
            version = body["metadata"]["resourceVersion"]
            return json_response(as_table(target.resource, [body], {"resourceVersion": version}))
        return json_response(body)

    def _list(self, request: Request, target: _Target) -> Response:
        resource, query = target.resource, request.query
        bodies, version = self._registry.select(
            resource,
            target.namespace,
            labels=query.get("labelSelector", ""),
            fields=query.get("fieldSelector", ""),
        )
        metadata: Json = {"resourceVersion": str(version)}
        try:
            limit = int(query.get("limit") or 0)
        except ValueError:
            raise bad_request(f"limit must be a number, not {query['limit']!r}") from None
        if token := query.get("continue"):
            start, snapshot = self._read_continue(token)
            metadata["resourceVersion"] = str(snapshot)
            bodies = [body for body in bodies if _position(body) > start]
        if 0 < limit < len(bodies):
            last = _position(bodies[limit - 1])
            payload = json.dumps({"after": last, "version": int(metadata["resourceVersion"])})
            metadata["continue"] = base64.urlsafe_b64encode(payload.encode()).decode()
            if not (query.get("labelSelector") or query.get("fieldSelector")):
                metadata["remainingItemCount"] = len(bodies) - limit
            bodies = bodies[:limit]
        if wants_table(request.headers.get("accept", "")):
            return json_response(as_table(resource, bodies, metadata))
        return json_response(
            {"apiVersion": resource.api_version, "kind": resource.list_kind, "metadata": metadata, "items": bodies}
        )

    def _read_continue(self, token: str) -> tuple[list[str], int]:
        try:
            payload = json.loads(base64.urlsafe_b64decode(token))
            start, version = list(payload["after"]), int(payload["version"])
        except (binascii.Error, ValueError, KeyError, TypeError):
            raise bad_request("continue key is not valid") from None
        try:
            self._registry.store.changes_after(NAMESPACES, "", version)
        except ApiError:
            raise expired("The provided continue parameter is too old; start the list again without it") from None
        return start, version

    def _watch(self, request: Request, target: _Target) -> Response:
        query = request.query
        matches = object_selector(target.resource, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        version = query.get("resourceVersion", "")
        if version and not version.isdigit():
            raise bad_request(f"resourceVersion: Invalid value: {version!r}")
        # As the real server: 30 to 60 minutes where the client does not say, so that watches do not end together.
        timeout = query.get("timeoutSeconds") or ""
        seconds = float(timeout) if timeout.isdigit() else random.uniform(1800, 3600)  # noqa: S311

        def row(body: Json) -> Json:
            return as_table(target.resource, [body], {"resourceVersion": body["metadata"]["resourceVersion"]})

        lines: Iterator[bytes] = watch(
            self._registry.store,
            target.resource,
            target.namespace,
            version,
            matches,
            timeout_seconds=seconds,
            alive=request.alive,
            shown=row if wants_table(request.headers.get("accept", "")) else lambda body: body,
        )
        return Response(stream=lines)

    def _create(self, request: Request, target: _Target) -> Response:
        body = _object_body(request)
        resource = target.resource
        if target.subresource == "binding":
            return self._bind(target, body)
        if target.subresource == "eviction":
            return self._evict(request, target, body)
        if target.name:
            raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        if body.get("kind", resource.kind) != resource.kind:
            raise bad_request(f"the object provided is a {body['kind']}, but this path serves {resource.kind}")
        if body.get("apiVersion", resource.api_version) != resource.api_version:
            raise bad_request(
                f"the API version in the data ({body['apiVersion']}) does not match the expected API version "
                f"({resource.api_version})"
            )
        if resource.namespaced and not target.namespace:
            raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        dry_run = _dry_run(request)
        created = self._registry.create(resource, target.namespace, body, manager=_manager(request), dry_run=dry_run)
        return json_response(created, 201)

    def _bind(self, target: _Target, body: Json) -> Response:
        node = (body.get("target") or {}).get("name")
        if not node:
            raise bad_request("a binding names its node in target.name")

        def bound(pod: Json) -> Json:
            pod["spec"]["nodeName"] = node
            return pod

        self._registry.update(PODS, target.namespace, target.name, bound, binding=True)
        return json_response({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}, 201)

    def _evict(self, request: Request, target: _Target, body: Json) -> Response:
        """What `kubectl drain` asks for: no disruption budgets are kept here, so it is a delete."""
        options = body.get("deleteOptions") or {}
        self._registry.delete(
            PODS,
            target.namespace,
            target.name,
            grace_seconds=options.get("gracePeriodSeconds"),
            dry_run=_dry_run(request, options),
        )
        return json_response({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}, 201)

    def _update(self, request: Request, target: _Target) -> Response:
        body = _object_body(request)
        body.setdefault("metadata", {})
        updated = self._registry.update(
            target.resource,
            target.namespace,
            target.name,
            lambda _current: body,
            status=target.subresource == "status",
            manager=_manager(request),
            dry_run=_dry_run(request),
        )
        return json_response(updated)

    def _patch(self, request: Request, target: _Target) -> Response:
        supported = [kind for kind in _PATCHES if kind != patches.STRATEGIC_MERGE_PATCH or not target.resource.custom]
        content_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if content_type not in supported:
            raise unsupported_media_type(supported)
        patch = _json_body(request)
        if content_type != patches.JSON_PATCH and not isinstance(patch, dict):
            raise bad_request("a merge patch is an object")

        def patched(current: Json) -> Json:
            result = _PATCHES[content_type](current, patch)
            if not isinstance(result, dict) or not isinstance(result.get("metadata"), dict):
                raise bad_request("the patch leaves no object with metadata")
            return result

        updated = self._registry.update(
            target.resource,
            target.namespace,
            target.name,
            patched,
            status=target.subresource == "status",
            manager=_manager(request),
            dry_run=_dry_run(request),
        )
        return json_response(updated)

    def _delete(self, request: Request, target: _Target) -> Response:
        options = _object_body(request)
        grace = request.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        preconditions = options.get("preconditions") or {}
        body, gone = self._registry.delete(
            target.resource,
            target.namespace,
            target.name,
            grace_seconds=None if grace is None else int(grace),
            uid=preconditions.get("uid"),
            version=preconditions.get("resourceVersion"),
            dry_run=_dry_run(request, options),
        )
        if not gone or target.resource is PODS:
            return json_response(body)
        details = {"name": target.name, "kind": target.resource.plural, "uid": body["metadata"]["uid"]}
        if target.resource.group:
            details["group"] = target.resource.group
        return json_response(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        )

    def _deletecollection(self, request: Request, target: _Target) -> Response:
        options = _object_body(request)
        grace = request.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        bodies, version = self._registry.select(
            target.resource,
            target.namespace,
            labels=request.query.get("labelSelector", ""),
            fields=request.query.get("fieldSelector", ""),
        )
        for body in bodies:
            metadata = body["metadata"]
            self._registry.delete(
                target.resource,
                metadata.get("namespace", ""),
                metadata["name"],
                grace_seconds=None if grace is None else int(grace),
                dry_run=_dry_run(request, options),
            )
        return json_response(
            {
                "apiVersion": target.resource.api_version,
                "kind": target.resource.list_kind,
                "metadata": {"resourceVersion": str(version)},
                "items": bodies,
            }
        )


def _position(body: Json) -> list[str]:
    return [body["metadata"].get("namespace", ""), body["metadata"]["name"]]
