"""Two transactions that meet on an item: the one that DynamoDB cancels has not been answered, and is not lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lambdas.adapters.store import DynamoIncidentStore
from lambdas.domain.errors import TransientError
from lambdas.domain.incident import iso
from lambdas.domain.records import Relaunch
from tests.adapters.store.test_store import an_incident
from tests.unit.recovery.alarms import NOW

ARN = "arn:c"


class Meeting:
    """The client of a table, whose next transactions meet others. moto runs them one after the other: the answer
    is the one that DynamoDB's API reference gives for TransactWriteItems."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reasons: list[str] = []
        self.times = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def transact_write_items(self, **given: Any) -> Any:
        if not self.times:
            return self._inner.transact_write_items(**given)
        self.times -= 1
        codes = self.reasons
        answer: Any = {
            "Error": {"Code": "TransactionCanceledException", "Message": f"Transaction cancelled, {codes}"},
            "CancellationReasons": [{"Code": code} for code in codes],
            "ResponseMetadata": {"HTTPStatusCode": 400},
        }
        raise ClientError(answer, "TransactWriteItems")

    def meets(self, *reasons: str, times: int = 1) -> None:
        self.reasons, self.times = list(reasons), times


@pytest.fixture
def meeting(dynamodb: Any) -> Meeting:
    return Meeting(dynamodb)


@pytest.fixture
def meeting_store(meeting: Meeting, table: str) -> DynamoIncidentStore:
    return DynamoIncidentStore(meeting, table)


@pytest.mark.parametrize("reasons", [["None", "TransactionConflict"], ["ConditionalCheckFailed", "ThrottlingError"]])
def test_a_release_that_meets_others_on_the_breaker_is_tried_again(
    meeting: Meeting, meeting_store: DynamoIncidentStore, reasons: list[str]
) -> None:
    """Two incidents of a cluster that close at once both write the breaker's item."""
    store = meeting_store
    assert store.claim_nodes("inc-1", ARN, ["node-1"], limit=2).granted
    meeting.meets(*reasons, times=3)
    with pytest.raises(TransientError):
        store.release_nodes("inc-1", ARN, ["node-1"])
    assert (store.quarantined(ARN), store.node_holder("node-1")) == ({"node-1"}, "inc-1")
    meeting.meets(*reasons)
    store.release_nodes("inc-1", ARN, ["node-1"])
    assert (store.quarantined(ARN), store.node_holder("node-1")) == (frozenset(), None)


def test_a_claim_that_meets_another_one_is_tried_again(meeting: Meeting, meeting_store: DynamoIncidentStore) -> None:
    meeting.meets("None", "TransactionConflict", times=3)
    with pytest.raises(TransientError):
        meeting_store.claim_nodes("inc-1", ARN, ["node-1"], limit=2)
    meeting.meets("None", "TransactionConflict")
    assert meeting_store.claim_nodes("inc-1", ARN, ["node-1"], limit=2).granted


def test_an_incident_that_is_to_take_a_job_over_is_never_answered_with_the_one_before(
    meeting: Meeting, meeting_store: DynamoIncidentStore
) -> None:
    """Its alarm would join an incident that nobody drives any more."""
    first = meeting_store.open(an_incident())
    meeting_store.save(first.evolve(relaunch=Relaunch(at=iso(NOW))))
    second = dataclasses.replace(an_incident(step=130), follows=first.incident_id)
    meeting.meets("TransactionConflict", "None", times=3)
    with pytest.raises(TransientError):
        meeting_store.open(second, taking_over=first.incident_id)
    assert meeting_store.open(second, taking_over=first.incident_id).incident_id == second.incident_id


def test_a_node_that_another_incident_holds_is_refused_with_what_to_do(meeting_store: DynamoIncidentStore) -> None:
    assert meeting_store.claim_nodes("inc-1", ARN, ["node-1"], limit=2).granted
    answer = meeting_store.claim_nodes("inc-2", ARN, ["node-1"], limit=2)
    assert (answer.granted, answer.tripped) == (False, False)
    assert "node-1 is held by incident inc-1: decide or close that one (go on from CloseIncident" in answer.reason
    assert answer.reason.endswith("then resume here at ResolveNode")
