"""What a table of single items cannot answer by key: which incidents there are, and which jobs train.

A global secondary index holds both, newest first: incidents by when they were opened, jobs by their newest sign of
training. It follows the table by itself, within a second or so; whoever decides reads the items.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from lambdas.adapters.aws import transient_errors
from lambdas.adapters.store_table import Table
from lambdas.domain.incident import IncidentStatus
from lambdas.domain.records import JobKey
from lambdas.ports import SeenJob
from lambdas.settings import LISTED, LISTED_AT, LISTING_INDEX
from truestep.contract import from_json

INCIDENTS: Final = "incidents"
JOBS: Final = "jobs"


def listed(kind: str, at: str) -> dict[str, dict[str, str]]:
    """The attributes that put an item into the index. kind: `INCIDENTS` or `JOBS`; at: as `iso` writes it."""
    return {LISTED: {"S": kind}, LISTED_AT: {"S": at}}


class Listing(Table):
    """Queries of the index."""

    def open_incident_ids(self) -> tuple[str, ...]:
        """Every incident that is not closed, newest first."""
        unclosed: dict[str, Any] = {
            "FilterExpression": "#status <> :closed",
            "ExpressionAttributeNames": {"#status": "status"},
        }
        return tuple(_id(item) for item in self._listed(INCIDENTS, {":closed": str(IncidentStatus.CLOSED)}, **unclosed))

    def recent_incident_ids(self, limit: int) -> tuple[str, ...]:
        """The newest incidents, closed ones too, newest first."""
        return tuple(_id(item) for item in self._newest(INCIDENTS, limit))

    def recent_jobs(self, limit: int) -> tuple[SeenJob, ...]:
        """The jobs whose training was seen last, newest first."""
        return tuple(
            SeenJob(job=from_json(JobKey, json.loads(item["job_key"]["S"])), seen_at=item[LISTED_AT]["S"])
            for item in self._newest(JOBS, limit)
        )

    def _newest(self, kind: str, limit: int) -> Iterator[dict[str, Any]]:
        for count, item in enumerate(self._listed(kind, {}, Limit=limit), start=1):
            yield item
            if count == limit:
                return

    def _listed(self, kind: str, values: dict[str, str], **arguments: Any) -> Iterator[dict[str, Any]]:
        asked: dict[str, Any] = {
            "TableName": self._table,
            "IndexName": LISTING_INDEX,
            "KeyConditionExpression": f"{LISTED} = :kind",
            "ExpressionAttributeValues": {name: {"S": value} for name, value in {":kind": kind, **values}.items()},
            "ScanIndexForward": False,
            **arguments,
        }
        while True:
            with transient_errors():
                page = self._client.query(**asked)
            yield from page["Items"]
            if "LastEvaluatedKey" not in page:
                return
            asked["ExclusiveStartKey"] = page["LastEvaluatedKey"]


def _id(item: dict[str, Any]) -> str:
    return str(item["PK"]["S"]).removeprefix("INCIDENT#")
