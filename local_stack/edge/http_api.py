"""The HTTP API: requests become events of payload format 2.0, and what the function returns becomes the answer.

Source: API Gateway Developer Guide, "Create AWS Lambda proxy integrations for HTTP APIs".
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from local_stack.edge.configuration import HttpRoute
from local_stack.edge.runtime_api import Outcome

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript")


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """A request to the HTTP API; header names in lower case, in the order received."""

    method: str
    path: str
    query: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    source_ip: str


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """An answer of the HTTP API."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def event_of(
    request: HttpRequest, route: HttpRoute, path_parameters: dict[str, str], account_id: str
) -> dict[str, Any]:
    """Return the event of payload format 2.0. A form's body is base64, as API Gateway sends it."""
    headers: dict[str, str] = {}
    for name, value in request.headers:
        if name != "cookie":
            headers[name] = f"{headers[name]},{value}" if name in headers else value
    now = time.time()
    event: dict[str, Any] = {
        "version": "2.0",
        "routeKey": route.route_key,
        "rawPath": request.path,
        "rawQueryString": request.query,
        "headers": headers,
        "requestContext": {
            "accountId": account_id,
            "apiId": route.api_id,
            "domainName": headers.get("host", ""),
            "domainPrefix": route.api_id,
            "http": {
                "method": request.method,
                "path": request.path,
                "protocol": "HTTP/1.1",
                "sourceIp": request.source_ip,
                "userAgent": headers.get("user-agent", ""),
            },
            "requestId": str(uuid.uuid4()),
            "routeKey": route.route_key,
            "stage": "$default",
            "time": datetime.fromtimestamp(now, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000"),
            "timeEpoch": int(now * 1000),
        },
        "isBase64Encoded": False,
    }
    cookies = [part for name, value in request.headers if name == "cookie" for part in value.split("; ")]
    if cookies:
        event["cookies"] = cookies
    query = parse_qs(request.query, keep_blank_values=True)
    if query:
        event["queryStringParameters"] = {name: ",".join(values) for name, values in query.items()}
    if path_parameters:
        event["pathParameters"] = path_parameters
    if request.body:
        is_text = headers.get("content-type", "").startswith(_TEXT_TYPES)
        event["body"] = request.body.decode() if is_text else base64.b64encode(request.body).decode()
        event["isBase64Encoded"] = not is_text
    return event


def answer_of(outcome: Outcome) -> HttpAnswer:
    """Turn what the function returned into an answer; a failure or a malformed one is a 500 that tells nothing."""
    if outcome.failed:
        return message(500, "Internal Server Error")
    try:
        returned = json.loads(outcome.payload)
        if not isinstance(returned, dict) or "statusCode" not in returned:
            return HttpAnswer(status=200, headers=[("content-type", "application/json")], body=outcome.payload)
        return _explicit_answer(returned)
    except (ValueError, TypeError, AttributeError):
        return message(500, "Internal Server Error")


def _explicit_answer(returned: dict[str, Any]) -> HttpAnswer:
    headers = [(str(name).lower(), str(value)) for name, value in (returned.get("headers") or {}).items()]
    headers += [("set-cookie", str(cookie)) for cookie in returned.get("cookies") or ()]
    if not any(name == "content-type" for name, _ in headers):
        headers.append(("content-type", "text/plain;charset=UTF-8"))
    text = str(returned.get("body") or "")
    body = base64.b64decode(text, validate=True) if returned.get("isBase64Encoded") else text.encode()
    return HttpAnswer(status=int(returned["statusCode"]), headers=headers, body=body)


def message(status: int, text: str) -> HttpAnswer:
    """Return an answer as API Gateway words its own."""
    body = json.dumps({"message": text}).encode()
    return HttpAnswer(status=status, headers=[("content-type", "application/json")], body=body)
