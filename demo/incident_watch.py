"""Watch the recovery as its own record tells it: incidents, alarms, the timeline."""

from __future__ import annotations

import json
from typing import Any

from demo.job import NAMESPACE, TrainingJob
from demo.stage import RejectedError
from demo.view import View
from lambdas.adapters.store import DynamoIncidentStore
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import JobKey

_GIVEN_BACK = (Outcome.RELEASED, Outcome.LEFT_ALONE)


class EscalatedError(Exception):
    """The recovery stopped and asks for a person; the message says where and why."""


def approved(incident: Incident) -> bool:
    """Whether a person has approved. Raises `RejectedError` once a rejection is recorded and its node given back."""
    decision = incident.approval.decision if incident.approval else None
    if decision is None or decision.approved:
        return decision is not None
    # The box says that the node is released, so the recovery is left to do that first.
    if any(entry.state == "ReleaseNode" and entry.outcome in _GIVEN_BACK for entry in incident.timeline):
        raise RejectedError
    return False


class IncidentWatch:
    """Reads the recovery's table. Prints every timeline entry once."""

    def __init__(self, client: Any, table_name: str, view: View) -> None:
        """client: boto3 DynamoDB client."""
        self._client = client
        self._table_name = table_name
        self._store = DynamoIncidentStore(client, table_name)
        self._view = view
        self._incident_id = ""
        self._shown: set[tuple[str, str, str]] = set()

    def find(self, job: TrainingJob) -> Incident | None:
        """The incident that holds the job; from then on `poll` follows it."""
        key = JobKey(cluster_arn=job.cluster_arn, namespace=NAMESPACE, kind="HyperPodPyTorchJob", name=job.name)
        incident = self._store.holder(key)
        if incident is not None:
            self._incident_id = incident.incident_id
        return incident

    def poll(self) -> Incident | None:
        """Print what is new in the followed incident's timeline. Raises `EscalatedError` where it was escalated."""
        if not self._incident_id:
            return None
        incident = self._store.load(self._incident_id)
        for entry in incident.timeline:
            key = (entry.state, entry.outcome, entry.reason)
            if entry.outcome != "pending" and key not in self._shown:
                self._shown.add(key)
                self._view.line(f"{entry.state}: {entry.outcome}. {entry.reason}")
        if incident.status is IncidentStatus.ESCALATED and incident.escalation:
            told = incident.escalation
            raise EscalatedError(f"{told.failed_state} was escalated: {told.error} {told.cause}")
        return incident

    def alarms(self, job: TrainingJob) -> int:
        """Alarms received from the job, whatever was made of them."""
        pages = self._client.get_paginator("scan").paginate(
            TableName=self._table_name,
            FilterExpression="begins_with(SK, :alarm)",
            ExpressionAttributeValues={":alarm": {"S": "ALARM#"}},
        )
        documents = [json.loads(item["document"]["S"]) for page in pages for item in page["Items"]]
        return sum(document["run"]["job_name"] == job.name for document in documents)
