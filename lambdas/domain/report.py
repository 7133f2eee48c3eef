"""What an incident cost and how it ended: the report that closes it."""

from __future__ import annotations

from typing import Any

from lambdas.domain.incident import Incident, parse_iso
from truestep.contract import to_json
from truestep.contract.words import counted

REPORT_SCHEMA_VERSION = 1


def report_key(incident: Incident) -> str:
    """Key of the report in the evidence bucket."""
    return f"incidents/{incident.incident_id}/report.json"


def report(incident: Incident) -> dict[str, Any]:
    """The incident's report as JSON: the record without secrets, and what it adds up to."""
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "summary": summary(incident),
        "costs": costs(incident),
        "incident": to_json(incident.to_public_json()),
    }


def costs(incident: Incident) -> dict[str, float | int | None]:
    """Lost steps, and the GPU-hours between the alarm and the resume; None where it is not known."""
    lost = incident.checkpoint.lost_steps if incident.checkpoint else None
    resumed = incident.verification.resumed_at or (incident.relaunch.at if incident.relaunch else "")
    if not resumed or incident.dry_run:
        return {"lost_steps": lost, "idle_seconds": None, "idle_gpu_hours": None}
    idle_seconds = max(0.0, (parse_iso(resumed) - parse_iso(incident.alarm.detected_at)).total_seconds())
    gpu_hours = idle_seconds * incident.alarm.run.world_size / 3600
    return {"lost_steps": lost, "idle_seconds": round(idle_seconds, 1), "idle_gpu_hours": round(gpu_hours, 2)}


def summary(incident: Incident) -> str:
    """The incident in one paragraph."""
    parts = [f"{incident.alarm.verdict.reason}"]
    for suspect in incident.suspects:
        exchange = suspect.replacement
        if exchange is not None and exchange.new_node_name:
            parts.append(f"Node {suspect.node_name} was replaced by {exchange.new_node_name}.")
        elif suspect.released_at:
            parts.append(f"Node {suspect.node_name} was released.")
    if incident.checkpoint is not None:
        parts.append(
            f"Training resumed from step {incident.checkpoint.checkpoint.step}, to compute "
            f"{counted(incident.checkpoint.lost_steps, 'step')} again."
        )
    if incident.verification.verified_at:
        parts.append(f"The first audit since passed at step {incident.verification.verified_step}.")
    if incident.dry_run:
        parts.append("Dry run: nothing was changed.")
    return " ".join(parts)
