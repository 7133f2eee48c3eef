"""The console: ``GET /console`` shows, behind a link that ``truestep incidents console`` has this function sign.

That command invokes it directly, under IAM, with ``{"console": {}}``. The function reads the table and can write
nothing; its key signs links of the console alone.
"""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.event_handler import APIGatewayHttpResolver, Response

from lambdas.adapters.approval_links import ConsoleLinks
from lambdas.adapters.aws import client
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.console import LINK_VALID, console_page
from lambdas.adapters.runtime import incident_store, log, normalised_errors, traced
from lambdas.domain.errors import LinkError, TransientError
from lambdas.domain.incident import iso
from lambdas.pages import render_notice, security_headers
from lambdas.settings import Settings, settings_from_environment

app = APIGatewayHttpResolver()


@app.get("/console")
def show() -> Response[str]:
    """The page."""
    settings, now = settings_from_environment("show_console"), SystemClock().now()
    try:
        with normalised_errors():
            until = _links(settings).verify(dict(app.current_event.query_string_parameters or {}), now=now)
            status, body = 200, console_page(incident_store(settings), settings, now=now, until=until)
    except LinkError as error:
        status, body = 403, render_notice("This link does not work", str(error))
    except TransientError:
        status, body = 503, render_notice("Try again", "A service did not answer. Load the page again.")
    # The path, never the query: its signature shows every incident to its holder.
    log("show_console", "answered", path=app.current_event.request_context.http.path, status=status)
    headers: dict[str, Any] = dict(security_headers())
    return Response(status_code=status, content_type="text/html; charset=utf-8", body=body, headers=headers)


def _links(settings: Settings) -> ConsoleLinks:
    return ConsoleLinks(client("kms"), settings.console_key_id, settings.approval_url)


def _resolve(event: dict[str, Any], context: Any) -> dict[str, Any]:
    # An event of the HTTP API always has its request context, so that no link makes another one.
    if "requestContext" in event or "console" not in event:
        return app.resolve(event, context)
    until = SystemClock().now() + LINK_VALID
    with normalised_errors():
        url = _links(settings_from_environment("show_console")).url(expires_at=until)
    log("show_console", "signed a link", expires_at=iso(until))
    return {"url": url, "expires_at": iso(until)}


handler = traced("show_console", _resolve)
