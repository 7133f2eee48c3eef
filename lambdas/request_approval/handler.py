"""State RequestApproval (task token): asks people, reminds them, and goes on at once where the answer is known."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from lambdas.adapters.approval_links import KmsLinks
from lambdas.adapters.aws import client
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.notifications import SnsNotifier
from lambdas.adapters.retrying import save_changed
from lambdas.adapters.runtime import Answer, Work, count, workflow_handler
from lambdas.domain.approval import announced, announcement_due, asked, settled
from lambdas.domain.messages import approval_wanted
from lambdas.domain.outcome import Outcome
from lambdas.domain.recommendation import recommend


def request_approval(work: Work) -> Answer:
    """Stores the token; ``waiting`` while the question is open, else the outcome that completes the state.

    The state's heartbeat brings it back here every few minutes with a new token, whatever became of the last entry.
    """
    incident = asked(work.incident, task_token=work.task_token, now=work.now, policy=work.policy)
    incident = incident.evolve(recommendation=recommend(incident))
    known = settled(incident, now=work.now)
    if known is not None:
        return work.answer(known[0], known[1], incident=incident)
    assert incident.approval is not None
    told = incident.approval.announcements
    again = f" (announced {told} times)" if told > 1 else ""
    reason = f"asked for a decision by {incident.approval.expires_at}{again}"
    return work.answer(Outcome.WAITING, reason, incident=incident)


def announce_or_complete(work: Work) -> None:
    """After the token is stored: tell people, or complete the state where there is nothing to ask any more.

    That they were told is noted after the message is out: an entry that died before leaves it to the next one.
    """
    incident = work.incident
    known = settled(incident, now=work.now)
    if (known is None or incident.dry_run) and announcement_due(incident, now=work.now):
        links = KmsLinks(client("kms"), work.settings.hmac_key_id, work.settings.approval_url)
        url = links.url(incident.incident_id, expires_at=work.now + timedelta(hours=work.policy.link_valid_hours))
        message = approval_wanted(incident, url)
        notifier = SnsNotifier(client("sns"), work.settings.topic_arn)
        attributes = {"kind": "approval", "incident_id": incident.incident_id}
        notifier.notify(message.subject, message.text, attributes=attributes, url=url)
        if incident.approval is not None and incident.approval.announced_at:
            count("request_approval", "ApprovalReminders")
        save_changed(work.store, incident.incident_id, partial(announced, now=work.now))
    if known is not None:
        output = {"incident_id": incident.incident_id, "outcome": str(known[0]), "reason": known[1]}
        StepFunctions(client("stepfunctions")).complete(work.task_token, output)


handler = workflow_handler("request_approval", "RequestApproval", request_approval, after_save=announce_or_complete)
