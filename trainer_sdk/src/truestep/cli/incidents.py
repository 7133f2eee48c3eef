"""The recovery's incidents, read from its table, and a decision about one, sent under the identity of who decides."""

from __future__ import annotations

import json
from typing import Any

from truestep.cli.deployment import Deployment, asking_aws, invoke
from truestep.cli.errors import CommandError
from truestep.cli.output import working
from truestep.contract.decision import IDENTITY_BODY, IDENTITY_HEADER, IDENTITY_TYPE, decider, decision_digest

_BATCH = 100
"""BatchGetItem takes so many keys."""
_SECRET = "task_token"  # noqa: S105 - the field's name


def list_incidents(deployment: Deployment, *, closed: bool) -> list[dict[str, Any]]:
    """All incidents that are not closed, or all, newest first."""
    table, client = deployment.outputs["TableName"], deployment.client("dynamodb")
    asked: dict[str, Any] = {
        "TableName": table,
        "IndexName": "Listing",
        "KeyConditionExpression": "listed = :kind",
        "ExpressionAttributeValues": {":kind": {"S": "incidents"}},
    }
    if not closed:
        asked |= {"FilterExpression": "#status <> :closed", "ExpressionAttributeNames": {"#status": "status"}}
        asked["ExpressionAttributeValues"][":closed"] = {"S": "closed"}
    found = []
    with (
        working("reading the incidents"),
        asking_aws("dynamodb:Query on the table's index Listing, and dynamodb:BatchGetItem on the table"),
    ):
        pages = client.get_paginator("query").paginate(**asked)
        keys = [{name: item[name] for name in ("PK", "SK")} for page in pages for item in page["Items"]]
        for first in range(0, len(keys), _BATCH):
            wanted: dict[str, Any] = {table: {"Keys": keys[first : first + _BATCH], "ConsistentRead": True}}
            while wanted:
                answer = client.batch_get_item(RequestItems=wanted)
                found += [_public(item) for item in answer["Responses"].get(table, ())]
                wanted = answer.get("UnprocessedKeys") or {}
    return sorted(found, key=lambda incident: str(incident["opened_at"]), reverse=True)


def load_incident(deployment: Deployment, incident_id: str) -> dict[str, Any]:
    """One incident. Raises `CommandError` where there is none."""
    with asking_aws("dynamodb:GetItem on the table"):
        item = deployment.item(f"INCIDENT#{incident_id}")
    if item is None:
        raise CommandError(f"no incident {incident_id!r}; truestep incidents list --all shows what there is")
    return _public(item)


def console_link(deployment: Deployment) -> dict[str, str]:
    """``{"url", "expires_at"}`` of the console, signed by the recovery. Whoever may invoke the function may look."""
    function = deployment.outputs["ConsoleFunction"]
    link: dict[str, str] = invoke(deployment, function, {"console": {}})
    return link


def decide(deployment: Deployment, incident_id: str, form: dict[str, str]) -> dict[str, Any]:
    """Have the recovery record a decision. Returns the incident as it is then.

    Raises `CommandError` where it is refused, with the recovery's reason.
    """
    function = deployment.outputs["DecideFunction"]
    asked = decider(function, region=deployment.session.region_name)
    identity = signed_identity(deployment, decision_digest(incident_id, form, deployment=asked))
    event = {"decide": {"incident_id": incident_id, "form": form, "identity": identity}}
    payload = invoke(deployment, function, event)
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
