"""What the table remembers beyond open incidents: a GPU's incidents, a job's attempts and checkpoints."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, Final

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.adapters.store_listing import JOBS, listed
from lambdas.adapters.store_table import Table
from lambdas.domain.attempts import with_sign
from lambdas.domain.errors import TransientError
from lambdas.domain.incident import Incident
from lambdas.domain.records import JobKey, PastIncident, TrainingAttempt
from lambdas.ports import RecordedCheckpoint
from truestep.contract import CheckpointEvent, canonical_bytes, from_json, to_json

_TRIES: Final = 8
_TRUST_RANK: Final = {"written": 0, "trusted": 1, "revoked": 2}


class GpuHistory(Table):
    """Which incidents a GPU was suspected in."""

    def record_gpus(self, incident: Incident) -> None:
        """Write the incident into the history of every suspect's GPU."""
        for suspect in incident.suspects:
            for gpu_uuid in suspect.gpu_uuids:
                past = PastIncident(
                    incident_id=incident.incident_id,
                    gpu_uuid=gpu_uuid,
                    node_name=suspect.node_name,
                    verdict_kind=str(incident.alarm.verdict.kind),
                    at=incident.opened_at,
                )
                with transient_errors():
                    self._client.put_item(
                        TableName=self._table,
                        Item={
                            "PK": {"S": f"GPU#{gpu_uuid}"},
                            "SK": {"S": f"INCIDENT#{incident.incident_id}"},
                            "document": {"S": canonical_bytes(past).decode()},
                        },
                    )

    def gpu_history(self, gpu_uuid: str, *, limit: int = 20) -> tuple[PastIncident, ...]:
        """Incidents of a GPU, newest first."""
        items = self._items(f"GPU#{gpu_uuid}", "INCIDENT#", newest_first=True)
        past = [from_json(PastIncident, json.loads(item["document"]["S"])) for item in items]
        return tuple(sorted(past, key=lambda entry: entry.at, reverse=True)[:limit])


class AttemptHistory(Table):
    """Which attempts of a job were heard of, and in which order."""

    def record_attempt(self, job: JobKey, attempt: TrainingAttempt) -> None:
        """Keep a sign of training, as `lambdas.domain.attempts.with_sign` has it."""
        for _ in range(_TRIES):
            text = self._attempts(job)
            known = _attempts_of(text)
            changed = with_sign(known, attempt)
            if changed == known or self._put_attempts(job, changed, instead_of=text):
                return
        raise TransientError(f"the attempts of job {job} keep changing; try again")

    def attempts(self, job: JobKey) -> tuple[TrainingAttempt, ...]:
        """The job's attempts in the order in which they were first heard of, the newest last."""
        return _attempts_of(self._attempts(job))

    def _attempts(self, job: JobKey) -> str:
        item = self._item(f"JOB#{job}", "ATTEMPTS")
        return "" if item is None else str(item["document"]["S"])

    def _put_attempts(self, job: JobKey, attempts: tuple[TrainingAttempt, ...], *, instead_of: str) -> bool:
        condition: dict[str, Any] = {"ConditionExpression": "attribute_not_exists(PK)"}
        if instead_of:
            condition = {
                "ConditionExpression": "document = :old",
                "ExpressionAttributeValues": {":old": {"S": instead_of}},
            }
        try:
            with transient_errors():
                self._client.put_item(
                    TableName=self._table,
                    Item={
                        "PK": {"S": f"JOB#{job}"},
                        "SK": {"S": "ATTEMPTS"},
                        # Of one format and zone, so that text sorts as time does.
                        **listed(JOBS, max(attempt.seen_at for attempt in attempts)),
                        "job_key": {"S": canonical_bytes(job).decode()},
                        "document": {"S": canonical_bytes([to_json(attempt) for attempt in attempts]).decode()},
                    },
                    **condition,
                )
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return False
        return True


def _attempts_of(text: str) -> tuple[TrainingAttempt, ...]:
    return tuple(from_json(TrainingAttempt, document) for document in json.loads(text)) if text else ()


class CheckpointHistory(Table):
    """What events said of a job's checkpoints. A hint: the marks beside the manifest decide."""

    def record_checkpoint(self, job: JobKey, event: CheckpointEvent, trust: str) -> None:
        """Keep what an event said of a checkpoint. Trust only rises: trusted stays trusted, revoked stays revoked."""
        if trust not in _TRUST_RANK:
            raise ValueError(f"trust is one of {', '.join(_TRUST_RANK)}, got {trust!r}")
        checkpoint = event.checkpoint
        try:
            with transient_errors():
                self._client.put_item(
                    TableName=self._table,
                    Item={
                        "PK": {"S": f"JOB#{job}"},
                        "SK": {"S": f"CHECKPOINT#{checkpoint.step:08d}#{checkpoint.manifest_sha256[:12]}"},
                        "trust": {"S": trust},
                        "trust_rank": {"N": str(_TRUST_RANK[trust])},
                        "document": {"S": canonical_bytes(event).decode()},
                    },
                    # Events arrive in any order: "written" after "trusted" must not take the trust away.
                    ConditionExpression="attribute_not_exists(PK) OR trust_rank <= :rank",
                    ExpressionAttributeValues={":rank": {"N": str(_TRUST_RANK[trust])}},
                )
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise

    def checkpoints(self, job: JobKey) -> tuple[RecordedCheckpoint, ...]:
        """What events said of the job's checkpoints, newest step first."""
        return tuple(
            RecordedCheckpoint(
                event=from_json(CheckpointEvent, json.loads(item["document"]["S"])), trust=item["trust"]["S"]
            )
            for item in self._items(f"JOB#{job}", "CHECKPOINT#", newest_first=True)
        )

    def newest_trusted(self, job: JobKey, *, among: int) -> CheckpointEvent | None:
        """The trusted checkpoint of the highest step, if it is among the job's `among` highest steps."""
        newest = islice(self._items(f"JOB#{job}", "CHECKPOINT#", newest_first=True, page_size=among), among)
        trusted = next((item for item in newest if item["trust"]["S"] == "trusted"), None)
        return None if trusted is None else from_json(CheckpointEvent, json.loads(trusted["document"]["S"]))
