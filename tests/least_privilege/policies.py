"""What IAM would say: policies of a template, evaluated against recorded requests.

As much of IAM's language as the template uses: Allow and Deny, wildcards in actions and resources, and four condition
operators. Anything else raises, so that a policy never passes because it was not understood.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class UnknownPolicyElementError(ValueError):
    """The template uses a part of IAM's language that is not evaluated here."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question: may this be done to that."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action} on {self.resource}" + (f" {dict(self.context)}" if self.context else "")


@dataclass(frozen=True, kw_only=True)
class Grant:
    """One action pattern on one resource pattern of a statement: the smallest thing that can be superfluous."""

    effect: str
    action: str
    resource: str
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, request: Request) -> bool:
        """Whether the statement speaks about the request."""
        return (
            _like(self.action.lower(), request.action.lower())
            and _like(self.resource, request.resource)
            and all(_holds(operator, keys, request.context) for operator, keys in self.conditions.items())
        )

    def __str__(self) -> str:
        return f"{self.effect} {self.action} on {self.resource}"


def grants_of(document: Mapping[str, Any]) -> Iterator[Grant]:
    """Every grant of a resolved policy document. Raises UnknownPolicyElementError."""
    for statement in document["Statement"]:
        known = {"Effect", "Action", "Resource", "Condition", "Sid"}
        if unknown := set(statement) - known:
            raise UnknownPolicyElementError(f"statement with {', '.join(sorted(unknown))}")
        conditions = statement.get("Condition", {})
        if unknown := set(conditions) - _OPERATORS.keys():
            raise UnknownPolicyElementError(f"condition operator {', '.join(sorted(unknown))}")
        for action in _many(statement["Action"]):
            for resource in _many(statement["Resource"]):
                yield Grant(effect=statement["Effect"], action=action, resource=resource, conditions=conditions)


def allowed(grants: Iterable[Grant], request: Request) -> bool:
    """Whether some grant allows the request and none denies it."""
    effects = {grant.effect for grant in grants if grant.matches(request)}
    return effects == {"Allow"}


def refused(grants: Iterable[Grant], requests: Iterable[Request]) -> list[str]:
    """Requests that are not allowed, as sentences."""
    kept = list(grants)
    return sorted({str(request) for request in requests if not allowed(kept, request)})


def unused(grants: Iterable[Grant], requests: Iterable[Request]) -> list[str]:
    """Permissions that no request needed, as sentences."""
    made = list(requests)
    return sorted(
        str(grant)
        for grant in grants
        if grant.effect == "Allow" and not any(grant.matches(request) for request in made)
    )


def _like(pattern: str, text: str) -> bool:
    # IAM knows * and ?; fnmatch would read [ as a class.
    return re.fullmatch(fnmatch.translate(pattern.replace("[", "[[]")), text) is not None


_OPERATORS: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda wanted, value: wanted == value,
    "StringLike": _like,
    "ArnLike": _like,
    "Bool": lambda wanted, value: wanted.lower() == value.lower(),
}


def _holds(operator: str, keys: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    """All keys must hold, any of a key's values; a key that the request has not never does."""
    given = {name.lower(): value for name, value in context.items()}
    return all(
        name.lower() in given and any(_OPERATORS[operator](str(value), given[name.lower()]) for value in _many(values))
        for name, values in keys.items()
    )


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
