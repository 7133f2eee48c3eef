"""EventBridge: PutEvents with each entry's own result. boto3 is imported when the first batch is sent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

from truestep.contract import ContractError, TruestepError, canonical_bytes, training_source
from truestep.report.outbox import OutboxEntry

BATCH_ENTRIES = 10
"""PutEvents takes at most ten entries a call."""
BATCH_BYTES = 240_000
"""PutEvents takes at most 256 KB a call, entries' other fields included."""

_PERMANENT_CODES = frozenset({"MalformedDetail", "InvalidArgument", "ValidationException", "ValidationError"})
"""Error codes that no retry turns into success: the entry itself is wrong. Missing permissions get granted."""


_DENIALS = frozenset(
    {"AccessDeniedException", "InvalidSignatureException", "ResourceNotFoundException", "UnrecognizedClientException"}
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})


class BusUnavailableError(TruestepError):
    """Nothing of the batch was sent; the message says what to do. Worth another attempt later."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting
        """No attempt within seconds will fare better: somebody has to do something first."""


class Outcome(StrEnum):
    """What became of one entry."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class SendResult:
    """The outcome of one entry of a batch."""

    outcome: Outcome
    reason: str = ""


class EventBus:
    """One event bus."""

    def __init__(self, name: str, *, region: str = "") -> None:
        """name: bus name or ARN. region: of the bus; an ARN's own region wins; empty: boto3's default."""
        self.name = name
        arn = name.split(":") if name.startswith("arn:") else []
        self._region = arn[3] if len(arn) > 3 else region  # a cut-off ARN is refused when it is sent to, not here
        self._client: Any = None

    def send(self, entries: Sequence[OutboxEntry]) -> list[SendResult]:
        """Send one of the `batches`. Raises `BusUnavailableError` where none of it got through."""
        cluster_arn, namespace = place_of(entries[0])
        try:
            source = training_source(cluster_arn, namespace)
        except ContractError as error:
            return [SendResult(outcome=Outcome.REFUSED, reason=str(error)) for _ in entries]
        client = self._connect()
        request = [
            {
                "EventBusName": self.name,
                "Source": source,
                "DetailType": str(entry.detail_type),
                "Detail": canonical_bytes(entry.detail).decode(),
            }
            for entry in entries
        ]
        try:
            answer = client.put_events(Entries=request)
        except Exception as error:
            code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
            if code in _PERMANENT_CODES and len(entries) == 1:
                return [SendResult(outcome=Outcome.REFUSED, reason=str(error))]
            if type(error).__name__ in _NO_CREDENTIALS:
                raise BusUnavailableError(
                    f"event bus {self.name}: {error}; give the pod's service account a role with the stack's training "
                    "policy, or sign in",
                    lasting=True,
                ) from error
            raise BusUnavailableError(
                f"event bus {self.name} does not take events of {source}: {error}; check its name and region, the "
                "policy of the pod's role (events:PutEvents with exactly this events:source) and the network",
                lasting=code in _DENIALS,
            ) from error
        return [_result(row) for row in answer["Entries"]]

    def _connect(self) -> Any:
        if self._client is None:
            try:
                import boto3
                from botocore.config import Config
            except ImportError as error:
                raise BusUnavailableError(
                    f"sending to event bus {self.name} needs boto3: pip install 'truestep[aws]'; "
                    "events stay in the outbox until then",
                    lasting=True,
                ) from error
            try:
                # Our own backoff decides about retries, and training must be told within seconds.
                config = Config(connect_timeout=3, read_timeout=10, retries={"total_max_attempts": 1})
                region = self._region or os.environ.get("AWS_REGION") or None
                # A session of its own: boto3's default session is not safe to share between threads.
                self._client = boto3.session.Session().client("events", region_name=region, config=config)
            except Exception as error:
                raise BusUnavailableError(
                    f"no client for event bus {self.name}: {error}; set AWS_REGION", lasting=True
                ) from error
        return self._client


def batches(entries: Sequence[OutboxEntry]) -> list[list[OutboxEntry]]:
    """`entries` in order, cut to what one call of PutEvents takes.

    Each batch has one source: IAM refuses a call as a whole, and an entry that an outbox has from another cluster must
    not keep this run's alarm back.
    """
    result: list[list[OutboxEntry]] = []
    for _, group in groupby(sorted(entries, key=place_of), key=place_of):
        size = BATCH_BYTES + 1
        for entry in group:
            entry_bytes = len(canonical_bytes(entry.detail)) + 500
            if size + entry_bytes > BATCH_BYTES or len(result[-1]) == BATCH_ENTRIES:
                result.append([])
                size = 0
            result[-1].append(entry)
            size += entry_bytes
    return result


def place_of(entry: OutboxEntry) -> tuple[str, str]:
    """Cluster ARN and namespace of the run that the entry is about; what is no text counts as missing."""
    run = entry.detail.get("run")
    cluster_arn, namespace = (run.get("cluster_arn"), run.get("namespace")) if isinstance(run, Mapping) else ("", "")
    return str(cluster_arn or ""), str(namespace or "")


def _result(row: Mapping[str, Any]) -> SendResult:
    code = row.get("ErrorCode")
    if not code:
        return SendResult(outcome=Outcome.ACCEPTED)
    reason = f"{code}: {row.get('ErrorMessage', '')}"
    return SendResult(outcome=Outcome.REFUSED if code in _PERMANENT_CODES else Outcome.RETRY, reason=reason)
