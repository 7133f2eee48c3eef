"""Executions beside one another: the record says which one drives the incident, and no other one does anything."""

from __future__ import annotations

import importlib
import json
import threading
from typing import Any

import pytest

from lambdas.adapters.clock import SystemClock
from lambdas.adapters.executions import StepFunctions
from lambdas.domain.errors import DrivenElsewhereError, TransientError
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.workflow import HAND_START_WITHIN
from lambdas.notice_end.handler import handler as notice_end
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, link_of, post
from tests.adapters.store_handlers.test_ended_execution import aborted, end_of, started


def enter(function: str, incident: Incident, execution: str, **event: str) -> dict[str, Any]:
    """What a state of the execution does."""
    handler = importlib.import_module(f"lambdas.{function}.handler").handler
    given = {"incident_id": incident.incident_id, "execution": execution, **event}
    answer: dict[str, Any] = handler(given, CONTEXT)
    return answer


def successor(cloud: Cloud, execution: str, incident: Incident) -> str:
    return StepFunctions(cloud.client("stepfunctions"), cloud.state_machine_arn).successor(
        execution, incident.incident_id
    )


TOKEN = {"task_token": "token"}
STATES = [
    ("open_incident", {}),
    ("read_history", {}),
    ("request_approval", TOKEN),
    ("verify_recovery", TOKEN),
    ("close_incident", {}),
    ("escalate", {**TOKEN, "failed_state": "OpenIncident", "error": "DrivenElsewhereError", "cause": ""}),
]


@pytest.mark.parametrize(("function", "event"), STATES, ids=[name for name, _ in STATES])
def test_one_started_beside_the_one_that_drives_does_nothing_in_any_state(
    cloud: Cloud, incident: Incident, function: str, event: dict[str, str]
) -> None:
    ours, by_hand = started(cloud, incident), started(cloud, incident, name="by-hand")
    assert enter("open_incident", incident, ours)["outcome"] == "proceed"
    before = cloud.store.load(incident.incident_id)
    assert before.execution == ours
    with pytest.raises(DrivenElsewhereError, match=f"execution {incident.incident_id} drives incident"):
        enter(function, incident, by_hand, **event)
    assert cloud.store.load(incident.incident_id) == before
    assert cloud.messages() == []
    assert enter("read_history", incident, ours)["outcome"] == "read"


def test_the_one_of_the_intake_is_first_though_it_has_not_come_to_its_first_state(
    cloud: Cloud, incident: Incident
) -> None:
    ours, by_hand = started(cloud, incident), started(cloud, incident, name="by-hand")
    with pytest.raises(DrivenElsewhereError):
        enter("open_incident", incident, by_hand)
    assert enter("open_incident", incident, ours)["outcome"] == "proceed"


def test_one_started_by_hand_after_the_end_drives_and_the_late_notice_of_that_end_escalates_nothing(
    cloud: Cloud, incident: Incident
) -> None:
    ours = started(cloud, incident)
    enter("open_incident", incident, ours)
    ended = aborted(cloud, ours)
    by_hand = started(cloud, incident, name="by-hand")
    assert enter("open_incident", incident, by_hand)["outcome"] == "proceed"
    driven = cloud.store.load(incident.incident_id)
    assert driven.execution == by_hand
    assert f"runs in {by_hand}" in notice_end(ended, CONTEXT)["reason"]
    assert (cloud.store.load(incident.incident_id), cloud.messages()) == (driven, [])
    with pytest.raises(DrivenElsewhereError):
        enter("read_history", incident, ours)

    # Its own end is the recovery's, and what people choose then is done by its successor alone.
    assert "escalated" in notice_end(aborted(cloud, by_hand), CONTEXT)["reason"]
    assert f"{by_hand} drove its incident" in notice_end(ended, CONTEXT)["reason"]
    (message,) = cloud.messages()
    path, query = link_of(message)
    assert post(path, query, decision="resume", resume_from="ReadHistory")["statusCode"] == 200
    assert enter("read_history", incident, successor(cloud, by_hand, incident))["outcome"] == "read"
    with pytest.raises(DrivenElsewhereError):
        enter("read_history", incident, by_hand)


@pytest.mark.parametrize("first", ["by hand", "successor"])
def test_of_a_choice_and_a_start_by_hand_the_faster_one_drives(cloud: Cloud, incident: Incident, first: str) -> None:
    ours = started(cloud, incident)
    enter("open_incident", incident, ours)
    notice_end(aborted(cloud, ours), CONTEXT)
    (message,) = cloud.messages()
    by_hand, chosen = started(cloud, incident, name="by-hand"), successor(cloud, ours, incident)
    if first == "by hand":
        taken = cloud.store.load(incident.incident_id).evolve(execution=by_hand)
        # Between its taking over and its first answer: the page shows the stop still.
        cloud.store.save(taken)
    path, query = link_of(message)
    post(path, query, decision="resume", resume_from="ReadHistory")
    if first == "by hand":
        with pytest.raises(DrivenElsewhereError):
            enter("read_history", incident, chosen)
        assert enter("open_incident", incident, by_hand)["outcome"] == "proceed"
        before = cloud.store.load(incident.incident_id)
        assert f"runs in {by_hand}" in notice_end(aborted(cloud, chosen), CONTEXT)["reason"]
        assert cloud.store.load(incident.incident_id) == before
    else:
        with pytest.raises(DrivenElsewhereError, match=chosen.rpartition(":")[2]):
            enter("open_incident", incident, by_hand)
        assert enter("read_history", incident, chosen)["outcome"] == "read"
        # As one that was refused ends.
        before = cloud.store.load(incident.incident_id)
        assert f"runs in {chosen}" in notice_end(aborted(cloud, by_hand), CONTEXT)["reason"]
        assert cloud.store.load(incident.incident_id) == before


def test_of_many_started_by_hand_at_once_one_drives(cloud: Cloud, incident: Incident) -> None:
    aborted(cloud, started(cloud, incident))
    many = [started(cloud, incident, name=f"by-hand-{index}") for index in range(6)]
    barrier, outcomes = threading.Barrier(len(many)), dict[str, str]()

    def enter_first(execution: str) -> None:
        barrier.wait()
        while True:
            try:
                outcomes[execution] = enter("open_incident", incident, execution)["outcome"]
            except TransientError:  # as the state machine does
                continue
            except DrivenElsewhereError:
                outcomes[execution] = "refused"
            return

    threads = [threading.Thread(target=enter_first, args=(execution,)) for execution in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes.values()) == ["proceed", *["refused"] * (len(many) - 1)]
    (driver,) = (execution for execution, outcome in outcomes.items() if outcome == "proceed")
    assert cloud.store.load(incident.incident_id).execution == driver


def test_a_successor_that_ended_before_its_first_state_has_one_that_drives(cloud: Cloud, incident: Incident) -> None:
    ours = started(cloud, incident)
    enter("open_incident", incident, ours)
    notice_end(aborted(cloud, ours), CONTEXT)
    path, query = link_of(cloud.messages()[0])
    post(path, query, decision="resume", resume_from="ReadHistory")
    chosen = successor(cloud, ours, incident)
    assert "escalated" in notice_end(aborted(cloud, chosen), CONTEXT)["reason"]
    post(path, query, decision="resume", resume_from="ReadHistory")
    assert enter("read_history", incident, successor(cloud, chosen, incident))["outcome"] == "read"
    for late in (ours, chosen):
        with pytest.raises(DrivenElsewhereError):
            enter("read_history", incident, late)


def test_one_that_never_drove_ends_without_a_word_though_the_driver_has_ended_too(
    cloud: Cloud, incident: Incident
) -> None:
    ours, by_hand = started(cloud, incident), started(cloud, incident, name="by-hand")
    enter("open_incident", incident, ours)
    ended = aborted(cloud, ours)
    assert "did nothing: its end changes nothing" in notice_end(aborted(cloud, by_hand), CONTEXT)["reason"]
    assert cloud.messages() == []
    assert "escalated" in notice_end(ended, CONTEXT)["reason"]
    assert cloud.store.load(incident.incident_id).status is IncidentStatus.ESCALATED
    notice_end(end_of(by_hand), CONTEXT)
    assert len(cloud.messages()) == 1


@pytest.mark.parametrize("then", ["drives", "ends", "stays away"])
def test_a_start_by_hand_right_after_the_end_is_left_the_time_to_take_the_incident_up(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    ours = started(cloud, incident)
    enter("open_incident", incident, ours)
    ended = aborted(cloud, ours)
    by_hand = started(cloud, incident, name="by-hand")
    before = cloud.store.load(incident.incident_id)
    with pytest.raises(TransientError, match=f"{by_hand} was started by hand"):
        notice_end(ended, CONTEXT)
    assert (cloud.store.load(incident.incident_id), cloud.messages()) == (before, [])

    # The event comes again.
    if then == "drives":
        enter("open_incident", incident, by_hand)
        assert f"runs in {by_hand}" in notice_end(ended, CONTEXT)["reason"]
        assert cloud.messages() == []
        return
    if then == "ends":
        aborted(cloud, by_hand)
    else:
        later = SystemClock().now() + HAND_START_WITHIN
        monkeypatch.setattr(SystemClock, "now", lambda _: later)
    assert "escalated" in notice_end(ended, CONTEXT)["reason"]
    assert len(cloud.messages()) == 1


def test_what_runs_for_other_incidents_or_cannot_take_this_one_up_is_not_waited_for(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = started(cloud, incident)
    enter("open_incident", incident, ours)
    ended = aborted(cloud, ours)
    other, ident = f"inc-{'f' * 16}", incident.incident_id
    for name, given in {
        "another": {"incident_id": other},
        "chosen": {"incident_id": ident, "resume_from": "ReadHistory"},
        "list": [ident],
        "nothing": {},
    }.items():
        started(cloud, incident, name=name, given=json.dumps(given))
    # Named as the recovery names those of another incident: there may be many, and none is asked for its input.
    recoveries = [started(cloud, incident, name=name) for name in (other, f"{other}-{'a' * 12}")]
    asked: list[str] = []
    find = StepFunctions.find
    monkeypatch.setattr(StepFunctions, "find", lambda self, arn: (asked.append(arn), find(self, arn))[1])
    assert "escalated" in notice_end(ended, CONTEXT)["reason"]
    assert len(cloud.messages()) == 1
    assert set(asked).isdisjoint(recoveries)
    assert any(arn.endswith(":another") for arn in asked)


def test_the_drivers_end_is_told_though_one_runs_that_its_first_state_will_refuse(
    cloud: Cloud, incident: Incident
) -> None:
    ours = started(cloud, incident)
    enter("open_incident", incident, ours)
    notice_end(aborted(cloud, ours), CONTEXT)
    path, query = link_of(cloud.messages()[0])
    by_hand = started(cloud, incident, name="by-hand")
    enter("open_incident", incident, by_hand)
    # The choice was made a moment before the start by hand took over, and its execution has not come to its state.
    cloud.client("stepfunctions").start_execution(
        stateMachineArn=cloud.state_machine_arn,
        name=successor(cloud, ours, incident).rpartition(":")[2],
        input=json.dumps({"incident_id": incident.incident_id, "resume_from": "ReadHistory"}),
    )
    assert "escalated" in notice_end(aborted(cloud, by_hand), CONTEXT)["reason"]
    assert len(cloud.messages()) == 1
    post(path, query, decision="resume", resume_from="ReadHistory")
    assert enter("read_history", incident, successor(cloud, by_hand, incident))["outcome"] == "read"
