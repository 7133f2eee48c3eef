"""How long a state has waited: only one waits at a time, and an interrupted wait begins again."""

from __future__ import annotations

from datetime import timedelta

from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.workflow import abandoned, answered, escalated, resumed
from tests.unit.recovery.alarms import NOW
from tests.unit.recovery.test_decisions import an_incident

LATER = NOW + timedelta(hours=3)


def waiting(state: str = "Relaunch") -> Incident:
    return answered(an_incident(), state=state, outcome="pending", reason="pods are missing", now=NOW)


def test_a_wait_counts_from_the_first_answer_whatever_else_is_noted_meanwhile() -> None:
    heard = waiting().noted(at=LATER, state="Training", outcome="resumed", reason="at step 99")
    again = answered(heard, state="Relaunch", outcome="pending", reason="pods are missing", now=LATER)
    assert again.waited_seconds("Relaunch", LATER) == 3 * 3600
    over = answered(again, state="Relaunch", outcome="relaunched", reason="all running", now=LATER)
    assert over.waiting_since == {}


def test_what_a_state_waited_for_is_over_when_another_one_answers() -> None:
    """Its function failed, or somebody started the workflow anew by hand."""
    for state in ("Escalate", "StartHealthCheck", "OpenIncident"):
        gone_on = answered(waiting("ConfirmSuspect"), state=state, outcome="proceed", reason="", now=LATER)
        assert gone_on.waited_seconds("ConfirmSuspect", LATER) == 0


def test_a_state_that_a_person_goes_on_from_has_its_whole_time_again() -> None:
    """Its execution had been stopped while it waited."""
    ended = abandoned(waiting(), execution="arn:e", status="ABORTED", why="", now=NOW)
    assert ended is not None
    assert resumed(ended, "Relaunch", by="by link", now=LATER).waiting_since == {}
    stopped = escalated(waiting(), failed_state="Relaunch", error="", cause="", task_token="t", now=NOW)
    stopped = stopped.evolve(status=IncidentStatus.ESCALATED)
    assert resumed(stopped, "Relaunch", by="by link", now=LATER).waiting_since == {}
