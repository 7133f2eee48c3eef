"""What a call asks IAM for: actions, resource ARNs and condition keys, so that calls can be held against policies.

Nothing is enforced here. Sources: the service authorization reference of each service, and where a call needs several
permissions (transactions, batches) the page of the operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

UNNAMED = ""
"""Resource of a request whose target its parameters do not name, like the task behind a token."""


@dataclass(frozen=True, kw_only=True)
class AuthorizationRequest:
    """One question to IAM. resource: an ARN, ``*`` where the action knows no resources, or `UNNAMED`."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)
    """Condition keys that the policies of this repository use, in IAM's spelling."""

    def to_json(self) -> dict[str, Any]:
        return {"action": self.action, "resource": self.resource, "context": dict(self.context)}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recognised call with what decides about it. parameters: members of its body; empty for S3."""

    service: str
    operation: str
    path: str
    query: str
    parameters: Mapping[str, Any]
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the call is made. hyperpod_arns: cluster name -> ARN, which the name does not tell."""

    region: str
    account_id: str
    hyperpod_arns: Mapping[str, str] = field(default_factory=dict)

    def named(self, service: str, kind: str, name_or_arn: str) -> str:
        """ARN of a resource here; what is an ARN already stays. kind: what stands before the name, as ``table/``."""
        if name_or_arn.startswith("arn:"):
            return name_or_arn
        return f"arn:aws:{service}:{self.region}:{self.account_id}:{kind}{name_or_arn}"


_Asks = Iterator[AuthorizationRequest]


def authorization_requests(request: Request, place: Place) -> list[AuthorizationRequest]:
    """Everything that the call needs, each once. Without a rule for its service: the operation, on `UNNAMED`."""
    rule = _RULES.get(request.service, _unknown)
    found: list[AuthorizationRequest] = []
    for asked in rule(request, place):
        if asked not in found:
            found.append(asked)
    return found


def _unknown(request: Request, place: Place) -> _Asks:  # noqa: ARG001 - every rule has this signature
    yield AuthorizationRequest(action=f"{request.service}:{request.operation}", resource=UNNAMED)


# Members of TransactItems, and the permission that each needs; PartiQL is not used.
_TRANSACTION_ACTIONS = {
    "Put": "PutItem", "Update": "UpdateItem", "Delete": "DeleteItem", "ConditionCheck": "ConditionCheckItem",
    "Get": "GetItem",
}  # fmt: skip


def _dynamodb(request: Request, place: Place) -> _Asks:
    parts = [part for item in request.parameters.get("TransactItems", ()) for part in item.items()]
    parts = parts or [(request.operation, request.parameters)]
    for member, parameters in parts:
        action = _TRANSACTION_ACTIONS.get(member, member)
        table = str(parameters.get("TableName", ""))
        resource = place.named("dynamodb", "table/", table) if table else UNNAMED
        # An index is a resource of its own, and its query asks for nothing of the table.
        index = parameters.get("IndexName")
        yield AuthorizationRequest(
            action=f"dynamodb:{action}", resource=f"{resource}/index/{index}" if index else resource
        )


_S3_ACTIONS = {
    "ListObjectsV2": "ListBucket", "ListObjects": "ListBucket", "HeadBucket": "ListBucket", "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject", "UploadPart": "PutObject", "CompleteMultipartUpload": "PutObject",
    "CopyObject": "PutObject", "DeleteObjects": "DeleteObject", "ListBuckets": "ListAllMyBuckets",
}  # fmt: skip
_DELETED_KEY = re.compile(rb"<Key>([^<]*)</Key>")


def _s3(request: Request, place: Place) -> _Asks:  # noqa: ARG001
    action = f"s3:{_S3_ACTIONS.get(request.operation, request.operation)}"
    bucket, _, key = unquote(request.path.lstrip("/")).partition("/")
    if request.operation == "DeleteObjects":
        for deleted in _DELETED_KEY.findall(request.body):
            yield AuthorizationRequest(action=action, resource=f"arn:aws:s3:::{bucket}/{deleted.decode()}")
        return
    if not bucket:
        yield AuthorizationRequest(action=action, resource="*")
        return
    if key:
        yield AuthorizationRequest(action=action, resource=f"arn:aws:s3:::{bucket}/{key}")
        return
    prefixes = parse_qs(request.query, keep_blank_values=True).get("prefix")
    context = {"s3:prefix": prefixes[0]} if prefixes and action == "s3:ListBucket" else {}
    yield AuthorizationRequest(action=action, resource=f"arn:aws:s3:::{bucket}", context=context)


def _events(request: Request, place: Place) -> _Asks:
    for entry in request.parameters.get("Entries", ()):
        bus = str(entry.get("EventBusName", "default"))
        context = {
            "events:source": str(entry.get("Source", "")),
            "events:detail-type": str(entry.get("DetailType", "")),
        }
        yield AuthorizationRequest(
            action=f"events:{request.operation}",
            resource=place.named("events", "event-bus/", bus),
            context=context if request.operation == "PutEvents" else {},
        )


def _kms(request: Request, place: Place) -> _Asks:
    algorithm = request.parameters.get("MacAlgorithm")
    yield AuthorizationRequest(
        action=f"kms:{request.operation}",
        resource=place.named("kms", "key/", str(request.parameters.get("KeyId", ""))),
        context={"kms:MacAlgorithm": str(algorithm)} if algorithm else {},
    )


def _states(request: Request, place: Place) -> _Asks:  # noqa: ARG001
    names = ("stateMachineArn", "executionArn")
    arn = next((str(request.parameters[name]) for name in names if name in request.parameters), UNNAMED)
    yield AuthorizationRequest(action=f"states:{request.operation}", resource=arn)


def _sagemaker(request: Request, place: Place) -> _Asks:
    name = str(request.parameters.get("ClusterName", ""))
    arn = place.hyperpod_arns.get(name) or place.named("sagemaker", "cluster/", name)
    yield AuthorizationRequest(action=f"sagemaker:{request.operation}", resource=arn)


def _sqs(request: Request, place: Place) -> _Asks:
    name = str(request.parameters.get("QueueUrl", request.parameters.get("QueueName", ""))).rsplit("/", 1)[-1]
    yield AuthorizationRequest(action=f"sqs:{request.operation}", resource=place.named("sqs", "", name))


def _sns(request: Request, place: Place) -> _Asks:  # noqa: ARG001
    topic = str(request.parameters.get("TopicArn", UNNAMED))
    yield AuthorizationRequest(action=f"sns:{request.operation}", resource=topic)


def _lambda(request: Request, place: Place) -> _Asks:
    found = re.search(r"/functions/([^/]+)", request.path)
    function = unquote(found[1]) if found else ""
    action = "InvokeFunction" if request.operation == "Invoke" else request.operation
    yield AuthorizationRequest(action=f"lambda:{action}", resource=place.named("lambda", "function:", function))


def _eks(request: Request, place: Place) -> _Asks:
    found = re.match(r"/clusters/([^/]+)", request.path)
    cluster = unquote(found[1]) if found else ""
    yield AuthorizationRequest(action=f"eks:{request.operation}", resource=place.named("eks", "cluster/", cluster))


_PROMETHEUS_ACTIONS = {
    "query": "QueryMetrics",
    "query_range": "QueryMetrics",
    "series": "GetSeries",
    "labels": "GetLabels",
}


def _prometheus(request: Request, place: Place) -> _Asks:
    found = re.fullmatch(r"/workspaces/([^/]+)/api/v1/(\w+)", request.path)
    if found is None:
        yield from _unknown(request, place)
        return
    action = _PROMETHEUS_ACTIONS.get(found[2], found[2])
    yield AuthorizationRequest(action=f"aps:{action}", resource=place.named("aps", "workspace/", found[1]))


def _cloudwatch(request: Request, place: Place) -> _Asks:  # noqa: ARG001
    yield AuthorizationRequest(action=f"cloudwatch:{request.operation}", resource="*")


_RULES: Mapping[str, Callable[[Request, Place], _Asks]] = {
    "dynamodb": _dynamodb,
    "s3": _s3,
    "events": _events,
    "kms": _kms,
    "states": _states,
    "sagemaker": _sagemaker,
    "sqs": _sqs,
    "sns": _sns,
    "lambda": _lambda,
    "eks": _eks,
    "aps": _prometheus,
    "monitoring": _cloudwatch,
}
"""Signing name -> rule."""
