"""Events at the edge of what their schema allows: refused by name, or through to the closed incident."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lambdas.adapters.executions import Execution
from lambdas.adapters.metrics_evidence import EvidenceBucket
from lambdas.adapters.metrics_snapshot import Snapshot
from lambdas.close_incident.handler import handler as close_incident
from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.cluster_nodes import QUARANTINE_KEY, read_mark
from lambdas.domain.errors import AlarmRefusedError
from lambdas.domain.incident import Incident, cut, parse_iso
from lambdas.domain.workflow import readable_cause
from lambdas.escalate.handler import handler as escalate
from lambdas.receive_alarm.handler import handler as receive_alarm
from lambdas.record_training_event.handler import handler as record_training_event
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, request, stop_event
from tests.adapters.store_handlers.test_intake import an_event, executions
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import CheckpointEvent, DetailType, to_json

TIMES = [
    "0001-01-01T00:00:00+14:00",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59-14:00",
    "9999-12-31T23:59:59Z",
    "1970-01-01T00:00:00+14:00",
    "2026-03-01T02:29:58.123456789Z",
    "2026-02-31T00:00:00Z",
    "2026-03-01T24:00:00Z",
]
DEEP = "[" * 100_000


def closes(cloud: Cloud, event: dict[str, Any]) -> bool:
    """Whether the alarm of the event gets through to the closed incident; False where it is refused by name."""
    try:
        incident_id = receive_alarm(event, CONTEXT)["incident_id"]
    except AlarmRefusedError:
        assert executions(cloud) == []
        return False
    incident = cloud.store.load(incident_id)
    Snapshot(incident, EvidenceBucket(cloud.client("s3"), cloud.bucket, incident_id), NOW).alarm()
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    assert decide_approval(request("GET", path, query), CONTEXT)["statusCode"] == 200
    escalate(stop_event(incident, "t", "Relaunch"), CONTEXT)
    assert decide_approval(request("GET", path, query), CONTEXT)["statusCode"] == 200
    assert close_incident({"incident_id": incident_id}, CONTEXT)["outcome"] == "closed"
    return True


@pytest.mark.parametrize("when", TIMES)
def test_an_alarms_time_at_the_edge_is_refused_or_gets_through(cloud: Cloud, when: str) -> None:
    alarm = dataclasses.replace(an_alarm(), detected_at=when)
    assert closes(cloud, an_event(alarm)) is (when in (TIMES[4], TIMES[5]))


@pytest.mark.parametrize("when", TIMES)
def test_a_training_events_time_at_the_edge_is_refused_or_recorded(cloud: Cloud, when: str) -> None:
    alarm = an_alarm()
    assert alarm.checkpoint is not None
    said = CheckpointEvent(run=alarm.run, checkpoint=alarm.checkpoint, weights_fingerprint="v1:00", at=when)
    event = {
        "source": an_event(alarm)["source"],
        "detail-type": str(DetailType.CHECKPOINT_WRITTEN),
        "detail": to_json(said),
    }
    if when in (TIMES[4], TIMES[5]):
        assert record_training_event(event, CONTEXT)["step"] == 99
        return
    with pytest.raises(AlarmRefusedError, match="no ISO 8601 time"):
        record_training_event(event, CONTEXT)


@pytest.mark.parametrize("depth", [50, 98, 99, 480, 600, 950])
@pytest.mark.parametrize("detail_type", [DetailType.ALARM, DetailType.CHECKPOINT_WRITTEN])
def test_a_detail_of_many_brackets_is_refused_or_gets_through(
    cloud: Cloud, depth: int, detail_type: DetailType
) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = [deep]
    event = an_event(an_alarm())
    if detail_type is DetailType.ALARM:
        event["detail"]["evidence"]["deep"] = deep  # below detail and evidence
        assert closes(cloud, event) is (depth < 99)
        return
    alarm = an_alarm()
    assert alarm.checkpoint is not None
    said = to_json(CheckpointEvent(run=alarm.run, checkpoint=alarm.checkpoint, weights_fingerprint="v1:00"))
    sent = {"source": event["source"], "detail-type": str(detail_type), "detail": {**said, "later": {"field": deep}}}
    if depth < 99:
        assert record_training_event(sent, CONTEXT)["step"] == 99
        return
    with pytest.raises(AlarmRefusedError, match="nested more than 100 deep"):
        record_training_event(sent, CONTEXT)


@pytest.mark.parametrize("character", ["a", "é", "あ", "😀", '"', "\\", "\u007f", "\u0001"])
def test_the_largest_alarm_and_the_longest_recovery_are_stored_to_the_end(cloud: Cloud, character: str) -> None:
    """255 KB of alarm, and 150 entries of as much as is kept of a message in any script."""
    event = an_event(an_alarm())
    unit = len(json.dumps(character, ensure_ascii=False).encode()) - 2
    event["detail"]["evidence"]["text"] = character * ((255_000 - 4000) // unit)
    incident = cloud.store.load(receive_alarm(event, CONTEXT)["incident_id"])
    for index in range(160):
        state = "StopTraining" if index % 2 else "Relaunch"
        incident = incident.noted(at=NOW, state=state, outcome="pending", reason=character * 500)
    cloud.store.save(incident)
    asked(cloud, incident, cloud.waiting_execution()[1])
    assert close_incident({"incident_id": incident.incident_id}, CONTEXT)["outcome"] == "closed"


def test_an_alarm_that_takes_more_room_than_it_had_on_the_way_is_refused_by_name(cloud: Cloud) -> None:
    event = an_event(an_alarm())
    event["detail"]["evidence"]["losses"] = [1e15] * 40_000  # five bytes each on the way, 18 in a record
    with pytest.raises(AlarmRefusedError, match=r"takes \d{6} bytes as it is kept"):
        receive_alarm(event, CONTEXT)
    assert executions(cloud) == []


@pytest.mark.parametrize("text", ["", "a", "é" * 300, "あ" * 200 + "end", '"' * 150, "\u0001" * 60, "😀" * 90])
def test_a_text_is_cut_at_a_character_by_what_it_takes_as_json(text: str) -> None:
    kept = cut(text, 200)
    size = len(json.dumps(kept, ensure_ascii=False).encode()) - 2
    assert text.startswith(kept)
    assert size <= 200
    assert kept == text or size > 200 - 6


def test_a_text_from_outside_that_no_parser_reads_is_damage_and_stops_nothing(incident: Incident) -> None:
    assert readable_cause(DEEP) == DEEP
    assert read_mark({"metadata": {"annotations": {QUARANTINE_KEY: DEEP}}}) is None
    by_hand = Execution(arn="arn:e", state_machine_arn="arn:m", status="RUNNING", given=DEEP)
    assert by_hand.begins_with == ""
    assert parse_iso(incident.opened_at).utcoffset() is not None
