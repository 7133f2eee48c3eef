"""State CloseIncident: writes the report, gives the claims back and tells people how it ended."""

from __future__ import annotations

from lambdas.adapters.aws import client
from lambdas.adapters.notifications import SnsNotifier
from lambdas.adapters.reports import write_report
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.confirmation import cut_short
from lambdas.domain.incident import iso
from lambdas.domain.messages import closed
from lambdas.domain.outcome import Outcome
from lambdas.domain.report import report_key


def close_incident(work: Work) -> Answer:
    """Always ``closed``; run again, it writes the same report over itself and finds the claims given back."""
    incident = cut_short(work.incident).evolve(closed_at=work.incident.closed_at or iso(work.now))
    uri = write_report(client("s3"), work.settings.evidence_bucket, incident)
    keys = [suspect.claim_key for suspect in incident.suspects if suspect.claim_key]
    work.store.release_nodes(incident.incident_id, incident.job.cluster_arn, keys)
    work.store.release_job(incident)
    return work.answer(Outcome.CLOSED, f"report at {uri}", incident=incident)


def announce(work: Work) -> None:
    """After the incident is stored as closed."""
    incident = work.incident
    message = closed(incident, f"s3://{work.settings.evidence_bucket}/{report_key(incident)}")
    notifier = SnsNotifier(client("sns"), work.settings.topic_arn)
    attributes = {"kind": "closed", "incident_id": incident.incident_id}
    notifier.notify(message.subject, message.text, attributes=attributes)


handler = workflow_handler("close_incident", "CloseIncident", close_incident, after_save=announce)
