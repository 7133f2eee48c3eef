"""Tells people where a recovery stopped, and lets it go on from the state that is on record as their choice."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial

from lambdas.adapters.retrying import save_changed
from lambdas.domain.incident import Incident
from lambdas.domain.messages import escalation
from lambdas.domain.workflow import continued, delivered, stop_announced, stop_announcement_due
from lambdas.ports import Executions, IncidentStore, Links, Notifier


def tell_of_stop(
    store: IncidentStore, links: Links, notifier: Notifier, incident: Incident, *, now: datetime, valid: timedelta
) -> None:
    """Send the message of the stop, with a link, where one is due; and note that it is out. valid: the link's time."""
    if not stop_announcement_due(incident, now=now):
        return
    url = links.url(incident.incident_id, expires_at=now + valid)
    message = escalation(incident, url)
    attributes = {"kind": "escalation", "incident_id": incident.incident_id}
    notifier.notify(message.subject, message.text, attributes=attributes, url=url)
    save_changed(store, incident.incident_id, partial(stop_announced, now=now))


def go_on(store: IncidentStore, executions: Executions, incident: Incident) -> bool:
    """Complete the token with the choice, and note that it arrived. False where the token is used or has run out.

    Without the note the choice stands: Escalate's next entry delivers it with the token that it is given.
    """
    stop = incident.escalation
    assert stop is not None
    assert stop.resume_from
    output = {"incident_id": incident.incident_id, "resume_from": stop.resume_from}
    arrived = executions.complete(stop.task_token, output)
    if arrived:
        save_changed(store, incident.incident_id, partial(delivered, task_token=stop.task_token))
    return arrived


def go_on_anew(store: IncidentStore, executions: Executions, incident: Incident, *, now: datetime) -> Incident:
    """Start a new execution from the choice where the one that waited for it has ended; returns the incident as it is.

    Once, however often it is called: an execution that ended has one successor. While the execution runs nothing is
    done: Escalate's next entry delivers the choice.
    """
    stop = incident.escalation
    assert stop is not None
    assert stop.resume_from
    if not stop.execution or not executions.ended(stop.execution):
        return incident
    successor = executions.succeed(stop.execution, incident.incident_id, stop.resume_from)
    change = partial(continued, ended=stop.execution, successor=successor, now=now)
    return save_changed(store, incident.incident_id, change)
