"""The recovery's incidents, read from its table, and a decision about one, sent under the identity of who decides."""

from __future__ import annotations

import json
from typing import Any

from truestep.cli.deployment import Deployment, asking_aws
from truestep.cli.errors import CommandError
from truestep.contract.decision import IDENTITY_BODY, IDENTITY_HEADER, IDENTITY_TYPE, decider, decision_digest

_SECRET = "task_token"  # noqa: S105 - the field's name


def list_incidents(deployment: Deployment, *, closed: bool) -> list[dict[str, Any]]:
    """All incidents that are not closed, or all, newest first. Reads the whole table."""
    found = []
    with asking_aws("dynamodb:Scan on the table"):
        pages = (
            deployment.client("dynamodb")
            .get_paginator("scan")
            .paginate(
                TableName=deployment.outputs["TableName"],
                ConsistentRead=True,
                FilterExpression="begins_with(PK, :incident) AND SK = :record",
                ExpressionAttributeValues={":incident": {"S": "INCIDENT#"}, ":record": {"S": "RECORD"}},
            )
        )
        for page in pages:
            found += [_public(item) for item in page["Items"]]
    shown = [incident for incident in found if closed or incident["status"] != "closed"]
    return sorted(shown, key=lambda incident: str(incident["opened_at"]), reverse=True)


def load_incident(deployment: Deployment, incident_id: str) -> dict[str, Any]:
    """One incident. Raises `CommandError` where there is none."""
    with asking_aws("dynamodb:GetItem on the table"):
        item = deployment.item(f"INCIDENT#{incident_id}")
    if item is None:
        raise CommandError(f"no incident {incident_id!r}; truestep incidents list --all shows what there is")
    return _public(item)


def decide(deployment: Deployment, incident_id: str, form: dict[str, str]) -> dict[str, Any]:
    """Have the recovery record a decision. Returns the incident as it is then.

    Raises `CommandError` where it is refused, with the recovery's reason.
    """
    function = deployment.outputs["DecideFunction"]
    asked = decider(function, region=deployment.session.region_name)
    identity = signed_identity(deployment, decision_digest(incident_id, form, deployment=asked))
    event = {"decide": {"incident_id": incident_id, "form": form, "identity": identity}}
    with asking_aws(f"lambda:InvokeFunction on {function}"):
        answer = deployment.client("lambda").invoke(FunctionName=function, Payload=json.dumps(event))
        payload: dict[str, Any] = json.loads(answer["Payload"].read())
    if "FunctionError" in answer:
        raise CommandError(f"{function} failed: {payload.get('errorMessage', payload)}; nothing is lost, send it again")
    if payload["status"] != 200:
        raise CommandError(str(payload["notice"]))
    incident: dict[str, Any] = payload["incident"]
    return incident


def signed_identity(deployment: Deployment, digest: str) -> dict[str, Any]:
    """A ``GetCallerIdentity`` request that only the recovery sends, and only with this digest."""
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest

    session = deployment.session
    with asking_aws("credentials that can sign"):
        url = session.client("sts").meta.endpoint_url.rstrip("/") + "/"
        headers = {"content-type": IDENTITY_TYPE, IDENTITY_HEADER: digest}
        request = AWSRequest(method="POST", url=url, data=IDENTITY_BODY, headers=headers)
        SigV4Auth(session.get_credentials(), "sts", session.region_name).add_auth(request)
    return {"url": url, "headers": dict(request.headers.items())}


def _public(item: dict[str, Any]) -> dict[str, Any]:
    incident: dict[str, Any] = json.loads(item["document"]["S"])
    for part in ("approval", "verification", "escalation"):
        if incident.get(part):
            incident[part].pop(_SECRET, None)
    return incident
