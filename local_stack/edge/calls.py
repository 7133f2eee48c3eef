"""Which AWS call a request is, and the record of all calls: who called what on what. Never secrets, never bodies."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import botocore.session

from local_stack.edge.authorization import AuthorizationRequest, Place, Request, authorization_requests

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/\d+/[^/]*/([^/]+)/aws4_request")
# What botocore calls a service whose signing name differs.
_MODEL_OF_SIGNING_NAME = {"states": "stepfunctions", "monitoring": "cloudwatch", "email": "ses"}
_CBOR_PATH = re.compile(r"/service/[^/]+/operation/(\w+)")
# Members that name the resource of a call, in the order in which they are looked for.
_RESOURCE_MEMBERS = (
    "TableName", "TopicArn", "KeyId", "stateMachineArn", "executionArn", "FunctionName", "QueueUrl", "EventBusName",
    "ClusterName", "ClusterArn", "Name", "name", "logGroupName",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Call:
    """One AWS call. resource: an ARN, a name or a path, as the caller gave it."""

    access_key: str
    service: str
    operation: str
    resource: str | None
    content_type: str = ""
    """Of the request: says in which protocol an error has to be worded."""
    authorization: tuple[AuthorizationRequest, ...] = ()
    """What the call needs of IAM."""


class CallRecord:
    """The calls so far, as JSON lines `{time, access_key, service, operation, resource, status, authorization}`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def add(self, call: Call, status: int) -> None:
        """Append one call and the HTTP status of its answer."""
        entry = {
            "time": round(time.time(), 6),
            "access_key": call.access_key,
            "service": call.service,
            "operation": call.operation,
            "resource": call.resource,
            "status": status,
            "authorization": [asked.to_json() for asked in call.authorization],
        }
        self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def identify(
    method: str, path: str, query: str, headers: Mapping[str, str], body: bytes, place: Place | None = None
) -> Call | None:
    """Name the call; None for a request that is not signed, which is no AWS call. place: also say what it asks IAM for.

    headers: names in lower case. Signatures in the header and in the query (presigned URLs) are understood.
    """
    signer = _signer(headers, query)
    if signer is None:
        return None
    access_key, service = signer
    parameters = _body_parameters(headers, body)
    operation = _operation(service, method, path, query, headers, parameters)
    request = Request(service=service, operation=operation, path=path, query=query, parameters=parameters, body=body)
    return Call(
        access_key=access_key,
        service=service,
        operation=operation,
        resource=_resource(service, path, parameters),
        content_type=headers.get("content-type", ""),
        authorization=tuple(authorization_requests(request, place)) if place else (),
    )


def _signer(headers: Mapping[str, str], query: str) -> tuple[str, str] | None:
    found = _CREDENTIAL.search(headers.get("authorization", ""))
    if found:
        return found[1], found[2]
    credential = parse_qs(query).get("X-Amz-Credential", [""])[0].split("/")
    return (credential[0], credential[3]) if len(credential) == 5 else None


def _body_parameters(headers: Mapping[str, str], body: bytes) -> Mapping[str, Any]:
    content_type = headers.get("content-type", "")
    try:
        if "x-www-form-urlencoded" in content_type:
            return {name: values[0] for name, values in parse_qs(body.decode()).items()}
        if "json" in content_type:
            parsed = json.loads(body or b"{}")
            return parsed if isinstance(parsed, dict) else {}
    except (ValueError, UnicodeDecodeError):
        pass
    return {}


def _operation(
    service: str, method: str, path: str, query: str, headers: Mapping[str, str], parameters: Mapping[str, Any]
) -> str:
    target = headers.get("x-amz-target")
    if target:
        return target.rsplit(".", 1)[-1]
    if "Action" in parameters:
        return str(parameters["Action"])
    cbor = _CBOR_PATH.fullmatch(path)
    if cbor:
        return cbor[1]
    names = parse_qs(query, keep_blank_values=True)
    for candidate in _rest_operations(service, method):
        if (
            candidate.query_names <= names.keys()
            and candidate.header_names <= headers.keys()
            and candidate.path.fullmatch(path)
        ):
            return candidate.name
    return f"{method} {path.split('/')[1] if '/' in path else path}"


@dataclass(frozen=True, kw_only=True)
class _RestOperation:
    """How an operation of a REST service is recognised; `PutObject` and `CopyObject` differ by a header alone."""

    name: str
    path: re.Pattern[str]
    query_names: frozenset[str]
    header_names: frozenset[str]

    @property
    def specificity(self) -> tuple[int, bool, int, str]:
        """Sorts the more specific operation first."""
        required = len(self.query_names) + len(self.header_names)
        return -required, ".+" in self.path.pattern, -len(self.path.pattern), self.name


@cache
def _rest_operations(service: str, method: str) -> tuple[_RestOperation, ...]:
    session = botocore.session.get_session()
    name = _MODEL_OF_SIGNING_NAME.get(service, service)
    if name not in session.get_available_services():
        return ()
    model = session.get_service_model(name)
    found = []
    for operation in map(model.operation_model, model.operation_names):
        if operation.http.get("method") != method:
            continue
        uri, _, query = operation.http.get("requestUri", "/").partition("?")
        shape = operation.input_shape
        found.append(
            _RestOperation(
                name=operation.name,
                path=_path_pattern(uri, service),
                query_names=frozenset(part.split("=")[0] for part in query.split("&") if part),
                header_names=frozenset(
                    member.serialization["name"].lower()
                    for required in (shape.required_members if shape else ())
                    if (member := shape.members[required]).serialization.get("location") == "header"
                ),
            )
        )
    return tuple(sorted(found, key=lambda operation: operation.specificity))


def _path_pattern(uri: str, service: str) -> re.Pattern[str]:
    # Clients of one local address use path style, which puts the bucket in front of what the model says.
    if service == "s3" and not uri.startswith("/{Bucket}"):
        uri = "/{Bucket}" + uri if uri != "/" else "/"
    pattern = "".join(
        "(?:.+)" if part.endswith("+}") else "(?:[^/]+)" if part.startswith("{") else re.escape(part)
        for part in re.split(r"(\{[^}]+\})", uri)
    )
    return re.compile(pattern + "/?")


def _resource(service: str, path: str, parameters: Mapping[str, Any]) -> str | None:
    if service == "s3":
        return unquote(path.strip("/")) or None
    if service == "lambda":
        found = re.search(r"/functions/([^/]+)", path)
        return unquote(found[1]) if found else None
    if service == "events" and isinstance(parameters.get("Entries"), list) and parameters["Entries"]:
        return str(parameters["Entries"][0].get("EventBusName", "default"))
    for member in _RESOURCE_MEMBERS:
        if isinstance(parameters.get(member), str):
            return str(parameters[member])
    return path if path != "/" else None
