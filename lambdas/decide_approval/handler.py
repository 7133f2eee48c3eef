"""The HTTP API: ``GET /incidents/{id}`` and ``.../charts/{name}`` show, ``POST /incidents/{id}/decision`` decides.

A GET changes nothing, because mail scanners follow links. ``truestep incidents`` invokes it directly, with
``{"decide": {"incident_id", "form", "identity"}}``; see `truestep.contract.decision`. The state machine ``approve``
invokes it with ``{"decide": {"execution": ARN}}``; see `lambdas.adapters.console_decision`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Any

from aws_lambda_powertools.event_handler import APIGatewayHttpResolver, Response

from lambdas.adapters.approval_links import KmsLinks
from lambdas.adapters.aws import client
from lambdas.adapters.callers import caller_arn
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.console_decision import console_decision
from lambdas.adapters.decision_mac import KmsDecisionMacs
from lambdas.adapters.decisions import Decisions, Reply
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.metrics_evidence import read_evidence
from lambdas.adapters.runtime import incident_store, log, normalised_errors, traced
from lambdas.domain.errors import IncidentNotFoundError, LinkError, TransientError
from lambdas.pages import render_notice, security_headers
from lambdas.settings import settings_from_environment
from truestep.contract.decision import decider, decision_digest

app = APIGatewayHttpResolver()


@app.get("/incidents/<incident_id>")
def show(incident_id: str) -> Response[str]:
    """The incident's page."""
    return _answer(lambda decisions, query: decisions.show(incident_id, query))


@app.get("/incidents/<incident_id>/charts/<name>")
def chart(incident_id: str, name: str) -> Response[str]:
    """One of the page's pictures, as SVG."""
    return _answer(lambda decisions, query: decisions.chart(incident_id, name, query))


@app.post("/incidents/<incident_id>/decision")
def decide(incident_id: str) -> Response[str]:
    """Records a decision and shows what became of it."""
    body = _body()
    source_ip = app.current_event.request_context.http.source_ip
    by = f"by link, from {source_ip}" if source_ip else "by link"
    return _answer(lambda decisions, query: decisions.decide(incident_id, query, body, by=by))


def _body() -> bytes:
    """The body as it was sent. One that is not what it says it is counts as no form at all."""
    sent = app.current_event.body or ""
    if not app.current_event.is_base64_encoded:
        return sent.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(sent, validate=True)
    except ValueError:
        return b"\xff"


def _answer(act: Callable[[Decisions, dict[str, str]], Reply]) -> Response[str]:
    query = dict(app.current_event.query_string_parameters or {})
    try:
        with normalised_errors():
            reply = act(_decisions(), query)
    except LinkError as error:
        reply = Reply(status=403, body=render_notice("This link does not work", str(error)))
    except IncidentNotFoundError:
        reply = Reply(status=404, body=render_notice("No such incident", "It may have been removed from the table."))
    except TransientError:
        text = "A service did not answer. Nothing is lost; send it again."
        reply = Reply(status=503, body=render_notice("Try again", text))
    # The path, never the query: its signature is what lets its holder decide.
    request = app.current_event.request_context.http
    log("decide_approval", "answered", method=request.method, path=request.path, status=reply.status)
    headers: dict[str, Any] = {**security_headers(), **reply.headers}
    return Response(status_code=reply.status, content_type=reply.content_type, body=reply.body, headers=headers)


def _decisions() -> Decisions:
    settings = settings_from_environment("decide_approval")
    return Decisions(
        settings=settings,
        store=incident_store(settings),
        links=KmsLinks(client("kms"), settings.hmac_key_id),
        signer=KmsDecisionMacs(client("kms"), settings.decision_key_id),
        executions=StepFunctions(client("stepfunctions"), settings.state_machine_arn),
        clock=SystemClock(),
        evidence=partial(read_evidence, client("s3")),
    )


def _by_command(asked: dict[str, Any], function_arn: str) -> dict[str, Any]:
    """A decision of ``truestep incidents``: invoked under IAM, and signed by whoever decides."""
    incident_id = str(asked.get("incident_id", ""))
    try:
        with normalised_errors():
            form, identity = _fields(asked.get("form")), _fields(asked.get("identity"))
            digest = _digest(incident_id, form, function_arn)
            by = caller_arn(identity, digest, function_arn=function_arn, now=SystemClock().now())
            deed = _decisions().act(incident_id, form, by=by, by_link=False)
    except LinkError as error:
        return {"status": 403, "notice": str(error)}
    except IncidentNotFoundError:
        return {"status": 404, "notice": f"no incident {incident_id} is in the table"}
    log("decide_approval", "decided", incident_id=incident_id, by=by, status=deed.status)
    return {"status": deed.status, "notice": deed.notice, "incident": deed.incident.to_public_json()}


def _by_execution(execution: str) -> dict[str, Any]:
    """A decision given in the console: the input of an execution of ``approve``, which invokes this."""
    incident_id = ""
    try:
        with normalised_errors():
            decisions = _decisions()
            approve_arn = decisions.settings.approve_state_machine_arn
            given = console_decision(StepFunctions(client("stepfunctions")), execution, approve_arn=approve_arn)
            incident_id = given.incident_id
            deed = decisions.act(incident_id, given.form, by=given.by, by_link=False)
    except LinkError as error:
        return {"status": 403, "incident_id": incident_id, "notice": str(error)}
    except IncidentNotFoundError:
        return {"status": 404, "incident_id": incident_id, "notice": f"no incident {incident_id} is in the table"}
    log("decide_approval", "decided", incident_id=incident_id, by=given.by, status=deed.status)
    decision = deed.incident.approval.decision if deed.incident.approval else None
    if decision is not None and decision.decided_by == given.by:
        # Also where this is asked again, because the first answer was lost: an execution decides once.
        word = "approved" if decision.approved else "rejected"
        return {"status": 200, "incident_id": incident_id, "notice": f"{word} at {decision.at}, {decision.decided_by}"}
    return {"status": deed.status, "incident_id": incident_id, "notice": deed.notice}


def _fields(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise LinkError("this is no decision: form and identity are objects")
    return given


def _digest(incident_id: str, form: dict[str, Any], function_arn: str) -> str:
    if not all(isinstance(value, str) for value in form.values()):
        raise LinkError("this is no decision: every field of the form is text")
    try:
        "".join((incident_id, *form, *form.values())).encode()
        return decision_digest(incident_id, form, deployment=decider(function_arn))
    except ValueError:
        # Half a surrogate pair passes JSON, and no service takes it.
        raise LinkError("this is no decision: its text is not Unicode") from None


def _resolve(event: dict[str, Any], context: Any) -> dict[str, Any]:
    # An event of the HTTP API always has its request context, so that no link leads to the other door.
    if "requestContext" not in event and isinstance(event.get("decide"), dict):
        if "execution" in event["decide"]:
            return _by_execution(str(event["decide"]["execution"]))
        return _by_command(event["decide"], str(context.invoked_function_arn))
    return app.resolve(event, context)


handler = traced("decide_approval", _resolve)
