"""The HTTP API answers as API Gateway does, with events of payload format 2.0."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from local_stack import LocalStack
from local_stack.edge.configuration import HttpRoute


def fetch(url: str, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any, bytes]:
    """Return (status, headers, body)."""
    request = urllib.request.Request(url, data=data, headers=dict(headers or {}))  # noqa: S310 - loopback
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - loopback
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_a_request_becomes_an_event_and_what_the_function_returns_the_answer(cloud: LocalStack) -> None:
    url = f"{cloud.outputs['ApiUrl']}/pages/inc-1?scope=decide&tag=a&tag=b&signature=x-_"
    status, headers, body = fetch(url, headers={"Cookie": "c=3; d=4", "X-Test": "yes"})

    event = json.loads(body)
    assert status == 201
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Seen"] == "scope=decide&tag=a&tag=b&signature=x-_"
    assert headers.get_all("Set-Cookie") == ["a=1", "b=2"]
    assert (event["version"], event["routeKey"]) == ("2.0", "GET /pages/{page_id}")
    assert event["pathParameters"] == {"page_id": "inc-1"}
    assert event["queryStringParameters"] == {"scope": "decide", "tag": "a,b", "signature": "x-_"}
    assert event["cookies"] == ["c=3", "d=4"]
    assert event["headers"]["x-test"] == "yes"
    assert event["requestContext"]["http"]["method"] == "GET"
    assert event["requestContext"]["http"]["sourceIp"] == "127.0.0.1"
    assert "body" not in event


def test_a_form_arrives_base64_encoded(cloud: LocalStack) -> None:
    form = b"decision=approve&comment=really%3F"
    content_type = {"Content-Type": "application/x-www-form-urlencoded"}
    _, _, body = fetch(f"{cloud.outputs['ApiUrl']}/pages/inc-1/form", form, content_type)

    event = json.loads(body)
    assert event["isBase64Encoded"] is True
    assert base64.b64decode(event["body"]) == form


def test_a_failing_function_is_an_internal_error_that_tells_nothing(cloud: LocalStack) -> None:
    status, _, body = fetch(f"{cloud.outputs['ApiUrl']}/boom")

    assert status == 500
    assert json.loads(body) == {"message": "Internal Server Error"}


@pytest.mark.parametrize("path", ["/pages", "/pages/a/b", "/pages/inc-1/form", "/"])
def test_what_no_route_serves_is_not_found(cloud: LocalStack, path: str) -> None:
    status, _, body = fetch(cloud.outputs["ApiUrl"] + path)

    assert status == 404
    assert json.loads(body) == {"message": "Not Found"}


def test_requests_to_the_api_are_no_aws_calls(cloud: LocalStack) -> None:
    before = len(cloud.calls())

    fetch(f"{cloud.outputs['ApiUrl']}/pages/inc-1?signature=x")

    assert not [call for call in cloud.calls()[before:] if call["service"] == "execute-api" or "signature" in str(call)]


@pytest.mark.parametrize(
    ("key", "method", "path", "parameters"),
    [
        ("GET /a/{id}", "GET", "/a/1", {"id": "1"}),
        ("GET /a/{id}", "POST", "/a/1", None),
        ("ANY /a/{id}", "POST", "/a/1", {"id": "1"}),
        ("GET /a/{rest+}", "GET", "/a/1/2", {"rest": "1/2"}),
        ("GET /a.b", "GET", "/axb", None),
        ("$default", "GET", "/anything", {}),
    ],
)
def test_a_route_matches_method_and_path(key: str, method: str, path: str, parameters: dict[str, str] | None) -> None:
    assert HttpRoute(api_id="api", route_key=key, function_name="f").match(method, path) == parameters
