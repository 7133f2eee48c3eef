"""A person who is not ready to decide is left alone for an hour, and the question stays open."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lambdas.domain.approval import (
    ASK_AGAIN_AFTER,
    REMIND_AFTER,
    announced,
    announcement_due,
    asked,
    decided,
    decision_refused,
    postpone_refused,
    postponed,
)
from lambdas.domain.incident import Incident, IncidentStatus, open_incident
from lambdas.domain.policy import Policy
from lambdas.domain.workflow import escalated
from tests.unit.recovery.alarms import NOW, an_alarm

MINUTE = timedelta(minutes=1)


def told() -> Incident:
    incident = asked(open_incident(an_alarm(), now=NOW, dry_run=False), task_token="t", now=NOW, policy=Policy())
    out = announced(incident.evolve(status=IncidentStatus.AWAITING_APPROVAL), now=NOW)
    assert out is not None
    return out


@pytest.mark.parametrize("pressed_after", [timedelta(0), REMIND_AFTER - MINUTE])
def test_the_next_message_comes_an_hour_after_the_button(pressed_after: timedelta) -> None:
    pressed = NOW + pressed_after
    later = postponed(told(), by="by link", now=pressed)
    assert not announcement_due(later, now=pressed + ASK_AGAIN_AFTER - MINUTE)
    assert announcement_due(later, now=pressed + ASK_AGAIN_AFTER)


def test_after_that_message_the_usual_reminder_is_back() -> None:
    again = NOW + ASK_AGAIN_AFTER
    out = announced(postponed(told(), by="by link", now=NOW), now=again)
    assert out is not None
    assert not announcement_due(out, now=again + ASK_AGAIN_AFTER)
    assert announcement_due(out, now=again + REMIND_AFTER)


def test_the_question_its_deadline_and_token_stay() -> None:
    before, later = told(), postponed(told(), by="by link", now=NOW)
    assert before.approval is not None
    assert later.approval is not None
    assert (later.approval.expires_at, later.approval.task_token) == (before.approval.expires_at, "t")
    assert decision_refused(later, approve=True, acknowledged=False, by_link=True, policy=Policy()) == ""


def test_a_stop_that_a_person_has_ended_is_told_at_once_all_the_same() -> None:
    later = postponed(told(), by="by link", now=NOW)
    stopped = escalated(
        later, failed_state="RequestApproval", error="E", cause="", task_token="t", now=NOW + 2 * MINUTE
    )
    assert announcement_due(stopped, now=NOW + 3 * MINUTE)


def test_where_nothing_is_asked_or_all_is_decided_nothing_can_be_postponed() -> None:
    assert postpone_refused(open_incident(an_alarm(), now=NOW, dry_run=False))
    assert postpone_refused(decided(told(), approve=True, by="x", comment="", now=NOW))
    assert postpone_refused(told().evolve(status=IncidentStatus.ESCALATED))
    assert postpone_refused(told()) == ""
