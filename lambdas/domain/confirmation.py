"""What running the failing computation again on the suspect showed."""

from __future__ import annotations

from lambdas.domain.incident import Incident
from lambdas.domain.records import Confirmation


def confirmation_of(incident: Incident) -> Confirmation:
    """Why the failing computation was not run again: without a bundle it cannot be, and with one a person runs it.

    ``evidence.bundle_uri`` of the alarm names the bundle. Skipping says nothing for or against the suspect.
    """
    uri = incident.alarm.evidence.get("bundle_uri")
    if not isinstance(uri, str) or not uri:
        return Confirmation(status="skipped", reason="the alarm carries no evidence bundle to run again")
    nodes = ", ".join(suspect.node_name for suspect in incident.suspects)
    return Confirmation(
        status="skipped",
        reason=f"not run here; `truestep confirm {uri}` on {nodes} would settle the cause",
    )
