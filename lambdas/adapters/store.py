"""`lambdas.ports.IncidentStore` on one DynamoDB table; keys as in docs/architecture.md.

Incidents are stored as one JSON document beside the attributes that conditions need: JSON round-trips floats, which
DynamoDB's own numbers do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.adapters.store_claims import NodeClaims
from lambdas.adapters.store_history import AttemptHistory, CheckpointHistory, GpuHistory
from lambdas.adapters.store_listing import INCIDENTS, Listing, listed
from lambdas.domain.errors import ConcurrentUpdateError, IncidentNotFoundError, TransientError
from lambdas.domain.incident import Incident, iso, job_of
from lambdas.domain.records import JobKey
from truestep.contract import Alarm, canonical_bytes

_ATTEMPTS = 5
_ALARM: Final = "ALARM#"
_ALARMS_NAMED: Final = 200
"""Of one incident: a directive names them, and takes 256."""


class DynamoIncidentStore(NodeClaims, AttemptHistory, CheckpointHistory, GpuHistory, Listing):
    """The recovery's memory in a table. `client` is a low-level boto3 DynamoDB client."""

    def record_alarm(self, alarm: Alarm, received_at: datetime) -> str | None:
        """Keep the alarm as received. Returns the id of the incident it already belongs to, or None."""
        key = _alarm_key(alarm)
        item = {
            **key,
            "received_at": {"S": iso(received_at)},
            "document": {"S": canonical_bytes(alarm).decode()},
        }
        try:
            with transient_errors():
                self._client.put_item(
                    TableName=self._table,
                    Item=item,
                    ConditionExpression="attribute_not_exists(PK)",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            earlier = self._item(key["PK"]["S"], key["SK"]["S"]) or {}
            return str(earlier["incident_id"]["S"]) if "incident_id" in earlier else None
        return None

    def assign_alarm(self, alarm: Alarm, incident_id: str) -> None:
        """Note which incident the alarm belongs to; ``notified`` where it opened none."""
        with transient_errors():
            self._client.update_item(
                TableName=self._table,
                Key=_alarm_key(alarm),
                UpdateExpression="SET incident_id = if_not_exists(incident_id, :id)",
                ExpressionAttributeValues={":id": {"S": incident_id}},
            )

    def alarms_of(self, incident: Incident) -> tuple[str, ...]:
        """Ids of the alarms that belong to the incident, sorted: its own, and the newest of those that joined it."""
        found = self._items(f"JOB#{incident.job}", _ALARM, newest_first=True, attributes="SK, incident_id, received_at")
        joined = sorted(
            (item["received_at"]["S"], item["SK"]["S"].removeprefix(_ALARM))
            for item in found
            if item.get("incident_id", {}).get("S") == incident.incident_id
        )
        return tuple(sorted({incident.alarm.alarm_id, *(alarm_id for _, alarm_id in joined[-_ALARMS_NAMED:])}))

    def open(self, incident: Incident, *, taking_over: str | None = None) -> Incident:
        """Claim the job and write the incident, both or neither. Returns the incident that holds the job then."""
        written = incident.evolve(version=1)
        condition = "attribute_not_exists(PK)"
        values: dict[str, Any] = {}
        if taking_over is not None:
            condition += " OR incident_id = :old"
            values = {":old": {"S": taking_over}}
        claim: dict[str, Any] = {
            "TableName": self._table,
            "Item": {
                **_key(f"JOB#{incident.job}", "CLAIM"),
                "incident_id": {"S": incident.incident_id},
                "claimed_at": {"S": incident.opened_at},
            },
            "ConditionExpression": condition,
        }
        if values:
            claim["ExpressionAttributeValues"] = values
        record = {
            "TableName": self._table,
            "Item": _incident_item(written),
            "ConditionExpression": "attribute_not_exists(PK)",
        }
        for _ in range(_ATTEMPTS):
            if self._transacted([{"Put": claim}, {"Put": record}]):
                return written
            # Either someone else holds the job, or this very incident was written by an earlier try.
            holder = self._settled(incident)
            if holder is not None:
                return holder
        raise TransientError(f"the claim of job {incident.job} keeps changing; try again")

    def _settled(self, incident: Incident) -> Incident | None:
        try:
            return self.load(incident.incident_id)
        except IncidentNotFoundError:
            return self.holder(incident.job)

    def holder(self, job: JobKey) -> Incident | None:
        """The incident that holds the job's claim."""
        incident_id = self.job_holder(job)
        return self.load(incident_id) if incident_id else None

    def job_holder(self, job: JobKey) -> str:
        """Id of the incident that holds the job's claim; empty where none does."""
        claim = self._item(f"JOB#{job}", "CLAIM")
        return "" if claim is None else str(claim["incident_id"]["S"])

    def load(self, incident_id: str) -> Incident:
        """Strongly consistent. Raises `IncidentNotFoundError`."""
        item = self._item(f"INCIDENT#{incident_id}", "RECORD")
        if item is None:
            raise IncidentNotFoundError(f"no incident {incident_id!r} in table {self._table}")
        return Incident.from_json(json.loads(item["document"]["S"]))

    def save(self, incident: Incident) -> Incident:
        """Write if nobody has since `incident.version`; returns it with its new version."""
        written = incident.evolve(version=incident.version + 1)
        try:
            with transient_errors():
                self._client.put_item(
                    TableName=self._table,
                    Item=_incident_item(written),
                    ConditionExpression="version = :expected",
                    ExpressionAttributeValues={":expected": {"N": str(incident.version)}},
                )
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            raise ConcurrentUpdateError(
                f"incident {incident.incident_id} has changed since version {incident.version}"
            ) from error
        return written

    def release_job(self, incident: Incident) -> None:
        """Give the job's claim back if this incident holds it."""
        try:
            with transient_errors():
                self._client.delete_item(
                    TableName=self._table,
                    Key=_key(f"JOB#{incident.job}", "CLAIM"),
                    ConditionExpression="attribute_not_exists(PK) OR incident_id = :id",
                    ExpressionAttributeValues={":id": {"S": incident.incident_id}},
                )
        except ClientError as error:
            # Another incident has taken the job over since: the claim is its own now.
            if error_code(error) != "ConditionalCheckFailedException":
                raise


def _key(pk: str, sk: str) -> dict[str, dict[str, str]]:
    return {"PK": {"S": pk}, "SK": {"S": sk}}


def _alarm_key(alarm: Alarm) -> dict[str, dict[str, str]]:
    """Of the job as well: whoever may report for another one could else use up the ids of this one's alarms."""
    return _key(f"JOB#{job_of(alarm)}", f"{_ALARM}{alarm.alarm_id}")


def _incident_item(incident: Incident) -> Mapping[str, Any]:
    return {
        **_key(f"INCIDENT#{incident.incident_id}", "RECORD"),
        "version": {"N": str(incident.version)},
        "status": {"S": str(incident.status)},
        **listed(INCIDENTS, incident.opened_at),
        "job": {"S": str(incident.job)},
        "document": {"S": canonical_bytes(incident).decode()},
    }
