"""Who may do what: ClusterRoles, Roles and their bindings, read from the manifests that are shipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from local_stack.cluster.kubernetes.auth import ADMINISTRATORS, Caller
from local_stack.cluster.kubernetes.errors import forbidden

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


def _documents(path: Path) -> Iterable[dict[str, Any]]:
    files = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")]) if path.is_dir() else [path]
    for file in files:
        for document in yaml.safe_load_all(file.read_text()):
            if isinstance(document, dict) and str(document.get("apiVersion", "")).startswith(
                "rbac.authorization.k8s.io/"
            ):
                yield document


REVIEWS_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
"""Where every authenticated caller may ask what it may do."""


class Authorizer:
    """Decides by the loaded roles; members of system:masters may do everything."""

    def __init__(self, manifests: Path | None) -> None:
        """`manifests`: a file or a directory of YAML; None grants nothing to anybody but administrators.

        Raises FileNotFoundError where it does not exist, ValueError where a binding names a role that is not there.
        """
        self._grants: list[_Grant] = []
        if manifests is None:
            return
        if not manifests.exists():
            raise FileNotFoundError(
                f"no RBAC manifests at {manifests}: name the directory with ClusterRole and bindings"
            )
        documents = list(_documents(manifests))
        roles = {
            (document["kind"], document["metadata"].get("namespace", ""), document["metadata"]["name"]): tuple(
                document.get("rules") or ()
            )
            for document in documents
            if document["kind"] in _ROLE_KINDS
        }
        for binding in (document for document in documents if document["kind"] in _BINDING_KINDS):
            self._grants.append(self._grant(binding, roles))

    @staticmethod
    def _grant(binding: dict[str, Any], roles: dict[tuple[str, str, str], tuple[dict[str, Any], ...]]) -> _Grant:
        namespace = binding["metadata"].get("namespace", "") if binding["kind"] == "RoleBinding" else ""
        role = binding["roleRef"]
        key = (role["kind"], namespace if role["kind"] == "Role" else "", role["name"])
        if key not in roles:
            name = binding["metadata"]["name"]
            raise ValueError(f"{binding['kind']} {name} refers to {role['kind']} {role['name']}, which is not defined")
        subjects = frozenset((subject["kind"], subject["name"]) for subject in binding.get("subjects") or [])
        return _Grant(subjects=subjects, namespace=namespace, rules=roles[key])

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

    def review(self, caller: Caller, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a SelfSubjectAccessReview: the caller's own question, with `status.allowed`."""
        wanted = body.get("spec", {}).get("resourceAttributes", {})
        subresource = wanted.get("subresource", "")
        access = Access(
            verb=wanted.get("verb", ""),
            group=wanted.get("group", ""),
            resource=wanted.get("resource", "") + (f"/{subresource}" if subresource else ""),
            namespace=wanted.get("namespace", ""),
            name=wanted.get("name", ""),
        )
        return {**body, "metadata": {}, "status": {"allowed": self.allowed(caller, access)}}

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
