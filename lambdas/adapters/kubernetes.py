"""The Kubernetes API, as far as the recovery uses it. Facts it must survive: every write may meet a newer state.

KubernetesError      the API server refused a request, and a person has to look at it
TransientError       (lambdas.domain.errors) no answer, 429 or 5xx, or the state kept changing under us
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import httpx2
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import GenericGlobalResource, GenericNamespacedResource, create_api_info
from lightkube.models.authorization_v1 import ResourceAttributes, SubjectAccessReviewSpec
from lightkube.resources.authorization_v1 import SubjectAccessReview
from lightkube.types import CascadeType, PatchType

from lambdas.domain.cluster_access import KUEUE_GROUP, Group, Verb, apply_command
from lambdas.domain.cluster_jobs import (
    KUEUE_OWNER_LABEL,
    JobKind,
    PodView,
    auto_resume_patch,
    is_suspended,
    job_kind,
    pod_view,
    queue_of,
    suspend_patch,
)
from lambdas.domain.cluster_nodes import FIELD_MANAGER, CordonPlan, Patch, ReleasePlan, plan_cordon, plan_release
from lambdas.domain.errors import TransientError
from lambdas.domain.records import JobKey
from truestep.contract import ContractError, ResumeDirective, TruestepError, from_json, parse_json, to_json

_log = logging.getLogger(__name__)
_Plan = TypeVar("_Plan", CordonPlan, ReleasePlan)

GUARDED_WRITE_ATTEMPTS = 6
"""A node's resourceVersion moves when a kubelet reports a changed status; six lost races in a row do not happen."""
_CONFLICT = 409
_INVALID = 422
_NOT_FOUND = 404
_BUSY = (429, 500, 502, 503, 504)
DIRECTIVE_KEY = "resume.json"
_SEGMENT: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


def raw_resource(group: str, version: str, kind: str, plural: str, *, namespaced: bool = True) -> Any:
    """A lightkube resource class whose objects are the JSON that the API server sends.

    lightkube's typed models refuse a whole object for one field that they do not expect, and drop fields that they do
    not know, which evidence must keep.
    """
    base = GenericNamespacedResource if namespaced else GenericGlobalResource
    return type(kind, (base,), {"_api_info": create_api_info(group, version, kind, plural)})


Node = raw_resource("", "v1", "Node", "nodes", namespaced=False)
Pod = raw_resource("", "v1", "Pod", "pods")
ConfigMap = raw_resource("", "v1", "ConfigMap", "configmaps")
BatchJob = raw_resource("batch", "v1", "Job", "jobs")
Workload = raw_resource(KUEUE_GROUP, "v1beta1", "Workload", "workloads")


class KubernetesError(TruestepError):
    """The API server refused a request; the message says which and why."""


class Kubernetes:
    """One cluster through one lightkube client. Node and pod documents are plain JSON, as the API server sends them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def may(self, group: Group, verb: Verb, namespace: str) -> bool:
        """Whether a group is allowed it in the namespace (empty: in all), by the API server's own answer."""
        resource, _, subresource = verb.resource.partition("/")
        wanted = ResourceAttributes(
            group=verb.group, resource=resource, subresource=subresource, verb=verb.verb, namespace=namespace
        )
        review = SubjectAccessReview(spec=SubjectAccessReviewSpec(groups=[group], resourceAttributes=wanted))
        with _translated("ask what the recovery's groups may do"):
            answer = self._client.create(review)
            return bool(answer.status and answer.status.allowed)

    def node(self, name: str) -> dict[str, Any] | None:
        """The node, or None where there is none of that name."""
        _check_names(name)
        with _translated(f"get node {name}"):
            return _or_none(lambda: dict(self._client.get(Node, name)))

    def cordon(self, name: str, incident_id: str, at: str) -> CordonPlan | None:
        """Quarantine the node as `plan_cordon` decides, in one guarded write. None: there is no such node."""
        return self._guarded(name, lambda node: plan_cordon(node, incident_id, at))

    def release(self, name: str, incident_id: str) -> ReleasePlan | None:
        """Take this incident's quarantine off, as `plan_release` decides. None: there is no such node."""
        return self._guarded(name, lambda node: plan_release(node, incident_id))

    def pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The pod, or None where there is none of that name."""
        _check_names(namespace, name)
        with _translated(f"get pod {namespace}/{name}"):
            return _or_none(lambda: dict(self._client.get(Pod, name, namespace=namespace)))

    def labelled_pods(self, namespace: str, label: str, value: str) -> tuple[dict[str, Any], ...]:
        """Pods of the namespace whose label has this value."""
        _check_names(namespace, value)
        with _translated(f"list pods of {namespace} with {label}={value}"):
            return tuple(dict(pod) for pod in self._client.list(Pod, namespace=namespace, labels={label: value}))

    def job_pods(self, job: JobKey) -> tuple[PodView, ...]:
        """Pods that carry the job's label, finished and terminating ones included. Raises `UnknownJobKindError`."""
        label = job_kind(job.kind).pod_label
        _check_names(job.namespace)
        with _translated(f"list pods of {job.kind} {job.namespace}/{job.name}"):
            pods = self._client.list(Pod, namespace=job.namespace, labels={label: job.name})
            return tuple(pod_view(pod) for pod in pods)

    def pods_on(self, node_name: str) -> tuple[PodView, ...]:
        """Pods of all namespaces that are bound to the node."""
        with _translated(f"list pods on node {node_name}"):
            pods = self._client.list(Pod, namespace="*", fields={"spec.nodeName": node_name})
            return tuple(pod_view(pod) for pod in pods)

    def log_tail(self, namespace: str, pod_name: str, lines: int) -> str | None:
        """The last lines of the pod's only container; None where the pod is gone or has not started."""
        _check_names(namespace, pod_name)
        with _translated(f"read the log of pod {namespace}/{pod_name}"):
            try:
                return "".join(self._client.log(pod_name, namespace=namespace, tail_lines=lines))
            except ApiError as error:
                if _code(error) in (_NOT_FOUND, 400):
                    return None
                raise

    def job(self, job: JobKey) -> dict[str, Any] | None:
        """The job's object, or None where there is none of that name. Raises `UnknownJobKindError`."""
        resource = _resource(job.kind, job_kind(job.kind))
        _check_names(job.namespace, job.name)
        with _translated(f"get {job.kind} {job.namespace}/{job.name}"):
            return _or_none(lambda: dict(self._client.get(resource, job.name, namespace=job.namespace)))

    def create_batch_job(self, manifest: Mapping[str, Any]) -> str:
        """Create a Job; its UID. Raises `TransientError` where one of its name has just come: look at whose it is."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        _check_names(namespace, name)
        with _translated(f"create Job {namespace}/{name}"):
            try:
                job = BatchJob(dict(manifest))
                made = self._client.create(job, namespace=namespace, field_manager=FIELD_MANAGER)
                return str(made["metadata"]["uid"])
            except ApiError as error:
                if _code(error) == _CONFLICT:
                    raise TransientError(f"Job {namespace}/{name} was created by somebody a moment ago") from error
                raise

    def delete_batch_job(self, namespace: str, name: str) -> bool:
        """Delete a Job and its pods. False: there is none of that name."""
        _check_names(namespace, name)
        with _translated(f"delete Job {namespace}/{name}"):
            # Said explicitly: for Jobs the API server's default leaves the pods running.
            delete = functools.partial(self._client.delete, BatchJob, name, cascade=CascadeType.BACKGROUND)
            return _or_none(lambda: delete(namespace=namespace) or True) is not None

    def suspend(self, job: JobKey) -> bool:
        """Ask for the job to stop, through its Workload where Kueue admits it; twice is once. False: no such job."""
        return self._set_suspended(job, True)

    def unsuspend(self, job: JobKey) -> bool:
        """Let the job run again; twice is once. False: there is no such job."""
        return self._set_suspended(job, False)

    def write_directive(self, job: JobKey, directive: ResumeDirective) -> bool:
        """Put the resume directive where the job's pods mount it. True if anything had to be written."""
        text = json.dumps(to_json(directive), sort_keys=True)
        return self.put_config_map(job.namespace, directive_name(job.name), {DIRECTIVE_KEY: text})

    def read_directive(self, job: JobKey) -> ResumeDirective | None:
        """The directive that lies there now; None without one, and where it cannot be read: it is about to be replaced.

        Somebody may have damaged it, or another version have written it; the log says so.
        """
        name = directive_name(job.name)
        _check_names(job.namespace, name)
        with _translated(f"get ConfigMap {job.namespace}/{name}"):
            found = _or_none(lambda: self._client.get(ConfigMap, name, namespace=job.namespace))
        text = (found.get("data") or {}).get(DIRECTIVE_KEY) if found is not None else None
        try:
            return None if text is None else from_json(ResumeDirective, parse_json(text))
        except (ValueError, ContractError) as error:
            _log.warning("ConfigMap %s/%s holds no directive that can be read: %r", job.namespace, name, error)
            return None

    def put_config_map(self, namespace: str, name: str, data: Mapping[str, str]) -> bool:
        """Make the ConfigMap hold these keys (others are kept). True if anything had to be written."""
        _check_names(namespace, name)
        with _translated(f"write ConfigMap {namespace}/{name}"):
            for _ in range(GUARDED_WRITE_ATTEMPTS):
                found = _or_none(lambda: self._client.get(ConfigMap, name, namespace=namespace))
                if found is not None and all(
                    (found.get("data") or {}).get(key) == value for key, value in data.items()
                ):
                    return False
                try:
                    if found is None:
                        created = {"metadata": {"name": name, "namespace": namespace}, "data": dict(data)}
                        self._client.create(ConfigMap(created), field_manager=FIELD_MANAGER)
                    else:
                        self._client.patch(
                            ConfigMap, name, {"data": dict(data)}, namespace=namespace, patch_type=PatchType.MERGE
                        )
                except ApiError as error:
                    # Somebody created or deleted it between the two requests: look again.
                    if _code(error) not in (_CONFLICT, _NOT_FOUND) or _is_missing_namespace(error):
                        raise
                else:
                    return True
        raise TransientError(f"ConfigMap {namespace}/{name} kept changing while it was written")

    def _set_suspended(self, job: JobKey, suspended: bool) -> bool:
        found = self.job(job)
        if found is None:
            return False
        patch = auto_resume_patch(found, off=suspended)
        if queue_of(found):
            self._patch_job(job, patch)
            if self._set_active(job, str(found["metadata"]["uid"]), not suspended):
                return True
            patch = {}
        how = job_kind(job.kind)
        if is_suspended(how, found) != suspended:
            patch |= suspend_patch(how, suspended)
        self._patch_job(job, patch)
        return True

    def _patch_job(self, job: JobKey, patch: Mapping[str, Any]) -> None:
        if not patch:
            return
        with _translated(f"patch {job.kind} {job.namespace}/{job.name}"):
            # A merge patch: strategic ones are refused with 415 on custom resources.
            resource = _resource(job.kind, job_kind(job.kind))
            self._client.patch(resource, job.name, patch, namespace=job.namespace, patch_type=PatchType.MERGE)

    def _set_active(self, job: JobKey, uid: str, active: bool) -> bool:
        """Let Kueue stop or admit the job. False where it has made no Workload of it."""
        with _translated(f"patch the Workload of {job.kind} {job.namespace}/{job.name}"):
            workloads = list(self._client.list(Workload, namespace=job.namespace, labels={KUEUE_OWNER_LABEL: uid}))
            for workload in workloads:
                if bool(workload["spec"].get("active", True)) != active:
                    patch = {"spec": {"active": active}}
                    name = workload["metadata"]["name"]
                    self._client.patch(Workload, name, patch, namespace=job.namespace, patch_type=PatchType.MERGE)
        return bool(workloads)

    def _guarded(self, name: str, plan: Callable[[dict[str, Any]], _Plan]) -> _Plan | None:
        with _translated(f"patch node {name}"):
            refusal: ApiError | None = None
            planned_on = ""
            for _ in range(GUARDED_WRITE_ATTEMPTS):
                node = self.node(name)
                if node is None:
                    return None
                if refusal is not None and node["metadata"]["resourceVersion"] == planned_on:
                    # Nothing has changed since: it is the patch itself that the server does not accept.
                    raise refusal
                decided = plan(node)
                if not decided.patch:
                    return decided
                planned_on = node["metadata"]["resourceVersion"]
                refusal = self._patch_node(name, decided.patch)
                if refusal is None:
                    return decided
        raise TransientError(f"node {name} changed {GUARDED_WRITE_ATTEMPTS} times while it was being patched")

    def _patch_node(self, name: str, patch: Patch) -> ApiError | None:
        """The refusal that a node gives which has changed since it was read; None where the patch was applied."""
        try:
            operations = [dict(operation) for operation in patch]
            self._client.patch(Node, name, operations, patch_type=PatchType.JSON, field_manager=FIELD_MANAGER)
        except ApiError as error:
            if _code(error) in (_CONFLICT, _INVALID, _NOT_FOUND):
                return error
            raise
        return None


def directive_name(job_name: str) -> str:
    """Name of the ConfigMap that holds the job's resume directive."""
    return f"truestep-resume-{job_name}"


def _check_names(*names: str) -> None:
    """Refuse a name that would leave its place in a request's path: lightkube puts names there as they are.

    Raises `KubernetesError`.
    """
    for name in names:
        if not _SEGMENT.fullmatch(name) or ".." in name:
            raise KubernetesError(f"{name[:253]!r} is no name of a Kubernetes object; nothing was asked for")


@functools.cache
def _resource(kind: str, how: JobKind) -> Any:
    return raw_resource(how.group, how.version, kind, how.plural)


def _code(error: ApiError) -> int:
    return int(error.response.status_code)


def _is_missing_namespace(error: ApiError) -> bool:
    return _code(error) == _NOT_FOUND and getattr(error.status.details, "kind", None) == "namespaces"


_T = TypeVar("_T")


def _or_none(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except ApiError as error:
        if _code(error) == _NOT_FOUND:
            return None
        raise


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPStatusError as error:
        code = error.response.status_code
        if code in _BUSY:
            raise TransientError(f"cannot {what}: HTTP {code}") from error
        advice = {
            401: ": the cluster does not know this role; add an EKS access entry for it",
            403: ": the role's Kubernetes groups lack this permission; apply the manifests: "
            f"{apply_command('')}, and in each training namespace {apply_command('<namespace>')}",
        }.get(code, "")
        raise KubernetesError(f"cannot {what}: HTTP {code} {error}{advice}") from error
    except httpx2.TransportError as error:
        raise TransientError(f"cannot {what}: the API server does not answer ({error!r})") from error
