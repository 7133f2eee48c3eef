"""Errors of the Kubernetes API, each with the `Status` body that a real server sends.

ApiError
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ApiError(Exception):
    """A refused request: HTTP code, machine-readable reason, message, and the details of the object meant."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    def status(self) -> dict[str, Any]:
        """The `Status` object of the response's body."""
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


def _named(plural: str, group: str, name: str) -> tuple[str, dict[str, Any]]:
    qualified = f"{plural}.{group}" if group else plural
    details: dict[str, Any] = {"name": name, "kind": plural}
    if group:
        details["group"] = group
    return f'{qualified} "{name}"', details


def not_found(plural: str, group: str, name: str) -> ApiError:
    """404: no object of that name."""
    subject, details = _named(plural, group, name)
    return ApiError(404, "NotFound", f"{subject} not found", details=details)


def no_such_path() -> ApiError:
    """404: no resource is served at that path."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(plural: str, group: str, name: str) -> ApiError:
    """409: create of a name that is taken."""
    subject, details = _named(plural, group, name)
    return ApiError(409, "AlreadyExists", f"{subject} already exists", details=details)


def conflict(plural: str, group: str, name: str, why: str = "") -> ApiError:
    """409: the object changed since it was read (or `why`)."""
    subject, details = _named(plural, group, name)
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    return ApiError(409, "Conflict", f"Operation cannot be fulfilled on {subject}: {why}", details=details)


def invalid(kind: str, group: str, name: str, causes: Sequence[Mapping[str, str]]) -> ApiError:
    """422: the object breaks its schema; `causes` are {reason, message, field}."""
    subject = f"{kind}.{group}" if group else kind
    text = ", ".join(f"{cause['field']}: {cause['message']}" for cause in causes)
    if len(causes) > 1:
        text = f"[{text}]"
    details: dict[str, Any] = {"name": name, "kind": kind, "causes": [dict(cause) for cause in causes]}
    if group:
        details["group"] = group
    return ApiError(422, "Invalid", f'{subject} "{name}" is invalid: {text}', details=details)


def unpatchable() -> ApiError:
    """422: a JSON patch that does not apply, a failed `test` among them. As terse as the real server."""
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request")


def bad_request(message: str) -> ApiError:
    """400: the request makes no sense."""
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    """401: no valid token."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(message: str, plural: str = "", group: str = "", name: str = "") -> ApiError:
    """403: the rules grant no such verb."""
    details = {key: value for key, value in (("name", name), ("group", group), ("kind", plural)) if value}
    return ApiError(403, "Forbidden", message, details=details)


def expired(message: str) -> ApiError:
    """410: the resourceVersion or continue token is older than the history that is kept."""
    return ApiError(410, "Expired", message)


def unsupported_media_type(supported: Sequence[str]) -> ApiError:
    """415: content type that this resource does not take."""
    accepted = ", ".join(supported)
    message = "the body of the request was in an unknown format - accepted media types include: " + accepted
    return ApiError(415, "UnsupportedMediaType", message)
