"""What people do with an incident: open the link of a message, and send the page's form."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.incident import Incident
from lambdas.request_approval.handler import handler as request_approval
from tests.adapters.store_handlers.conftest import Cloud

CONTEXT: Any = None


def request(method: str, path: str, query: dict[str, str], form: dict[str, str] | None = None) -> dict[str, Any]:
    """An HTTP API event in payload format 2.0."""
    return {
        "version": "2.0",
        "routeKey": f"{method} {path}",
        "rawPath": path,
        "rawQueryString": urlencode(query),
        "queryStringParameters": query,
        "headers": {"content-type": "application/x-www-form-urlencoded"},
        "requestContext": {
            "stage": "$default",
            "http": {"method": method, "path": path, "sourceIp": "192.0.2.7", "protocol": "HTTP/1.1", "userAgent": "t"},
        },
        "body": urlencode(form) if form is not None else "",
        "isBase64Encoded": False,
    }


def link_of(message: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Path and query of the link in a message."""
    url = re.search(r"https://approval\.example\S+", message["Message"])
    assert url is not None
    parts = urlsplit(url.group())
    return parts.path, dict(parse_qsl(parts.query))


def asked(cloud: Cloud, incident: Incident, token: str) -> tuple[str, dict[str, str]]:
    answer = request_approval({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    assert answer["outcome"] == "waiting"
    (message,) = cloud.messages()
    return link_of(message)


def post(path: str, query: dict[str, str], **form: str) -> dict[str, Any]:
    """The page that a browser shows after the form was sent: where it is sent elsewhere, what it finds there."""
    page = decide_approval(request("POST", f"{path}/decision", query, form), CONTEXT)
    if page["statusCode"] != 303:
        return page
    target = urlsplit(urljoin(f"https://approval.example{path}/decision", page["headers"]["Location"]))
    return decide_approval(request("GET", target.path, dict(parse_qsl(target.query))), CONTEXT)


def stop_event(incident: Incident, token: str, state: str) -> dict[str, str]:
    return {"incident_id": incident.incident_id, "task_token": token, "failed_state": state, "error": "E", "cause": ""}


def notice(page: dict[str, Any]) -> tuple[int, list[str]]:
    return page["statusCode"], re.findall(r'role="status">([^<]*)', page["body"])
