"""Who may do what: ClusterRoles, Roles and their bindings, read from the manifests that are shipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from local_stack.cluster.kubernetes.auth import ADMINISTRATORS, Caller
from local_stack.cluster.kubernetes.errors import ApiError, forbidden

_ROLE_KINDS = ("ClusterRole", "Role")
_BINDING_KINDS = ("ClusterRoleBinding", "RoleBinding")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a request wants: a verb on a resource (`pods/log` with its subresource), in a namespace or cluster-wide."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class _Grant:
    subjects: frozenset[tuple[str, str]]
    namespace: str
    """Empty: everywhere."""
    rules: tuple[dict[str, Any], ...]


def _matches(allowed: Iterable[str], wanted: str) -> bool:
    return any(pattern in ("*", wanted) for pattern in allowed)


def _resource_matches(allowed: Iterable[str], wanted: str) -> bool:
    subresource = wanted.partition("/")[2]
    return _matches(allowed, wanted) or bool(subresource and f"*/{subresource}" in allowed)


def _allows(rule: dict[str, Any], access: Access) -> bool:
    names = rule.get("resourceNames") or []
    return (
        _matches(rule.get("verbs") or [], access.verb)
        and _matches(rule.get("apiGroups") or [], access.group)
        and _resource_matches(rule.get("resources") or [], access.resource)
        and (not names or access.name in names)
    )


def _documents(folder: Path) -> Iterator[dict[str, Any]]:
    """What ``kubectl apply -k`` would send. Raises FileNotFoundError where the folder is no kustomization."""
    kustomization = folder / "kustomization.yaml"
    if not kustomization.is_file():
        raise FileNotFoundError(f"no kustomization at {folder}: name a folder with cluster/ and namespace/")
    for name in yaml.safe_load(kustomization.read_text())["resources"]:
        yield from yaml.safe_load_all((folder / name).read_text())


REVIEWS = Access(verb="create", group="authorization.k8s.io", resource="subjectaccessreviews")
REVIEWS_PATH = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
"""Where a caller who may create reviews asks what others may do."""


class Authorizer:
    """Decides by the loaded roles; members of system:masters may do everything."""

    def __init__(self, manifests: Path | None, namespaces: Iterable[str] = ()) -> None:
        """manifests: folder of the kustomizations ``cluster``, applied once, and ``namespace``, applied in each of
        `namespaces`; None grants nothing to anybody but administrators.

        Raises FileNotFoundError where one does not exist, ValueError where a binding names a role that is not there.
        """
        self._grants: list[_Grant] = []
        if manifests is not None:
            self._apply(manifests / "cluster", "")
            for namespace in namespaces:
                self._apply(manifests / "namespace", namespace)

    def _apply(self, folder: Path, namespace: str) -> None:
        documents = list(_documents(folder))
        roles = {
            (document["kind"], document["metadata"]["name"]): tuple(document.get("rules") or ())
            for document in documents
            if document["kind"] in _ROLE_KINDS
        }
        for binding in (document for document in documents if document["kind"] in _BINDING_KINDS):
            role = (binding["roleRef"]["kind"], binding["roleRef"]["name"])
            if role not in roles:
                name = binding["metadata"]["name"]
                raise ValueError(f"{binding['kind']} {name} refers to {' '.join(role)}, which is not defined")
            subjects = frozenset((subject["kind"], subject["name"]) for subject in binding.get("subjects") or [])
            where = (namespace or "default") if binding["kind"] == "RoleBinding" else ""
            self._grants.append(_Grant(subjects=subjects, namespace=where, rules=roles[role]))

    def allowed(self, caller: Caller, access: Access) -> bool:
        """Whether any rule bound to the caller grants the access."""
        if ADMINISTRATORS in caller.groups:
            return True
        subjects = {("User", caller.user), *(("Group", group) for group in caller.groups)}
        return any(
            grant.subjects & subjects
            and grant.namespace in ("", access.namespace)
            and any(_allows(rule, access) for rule in grant.rules)
            for grant in self._grants
        )

    def review(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a SubjectAccessReview: the question with `status.allowed`. Raises 422 where it is about nobody."""
        spec = body.get("spec", {})
        if not spec.get("user") and not spec.get("groups"):
            raise ApiError(422, "Invalid", "spec: at least one of user or group must be specified")
        wanted = spec.get("resourceAttributes", {})
        subresource = wanted.get("subresource", "")
        access = Access(
            verb=wanted.get("verb", ""),
            group=wanted.get("group", ""),
            resource=wanted.get("resource", "") + (f"/{subresource}" if subresource else ""),
            namespace=wanted.get("namespace", ""),
            name=wanted.get("name", ""),
        )
        subject = Caller(spec.get("user", ""), frozenset(spec.get("groups") or ()))
        return {**body, "metadata": {}, "status": {"allowed": self.allowed(subject, access)}}

    def authorize(self, caller: Caller, access: Access) -> None:
        """Raise 403, worded as the real server words it, where nothing grants the access."""
        if self.allowed(caller, access):
            return
        plural = access.resource.partition("/")[0]
        qualified = f"{plural}.{access.group}" if access.group else plural
        subject = f'{qualified} "{access.name}"' if access.name else qualified
        scope = f' in the namespace "{access.namespace}"' if access.namespace else " at the cluster scope"
        message = (
            f'{subject} is forbidden: User "{caller.user}" cannot {access.verb} resource "{access.resource}" in API '
            f'group "{access.group}"{scope}'
        )
        raise forbidden(message, plural, access.group, access.name)
