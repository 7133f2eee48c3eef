"""The order to resume that a relaunch puts where the pods mount it. Pure."""

from __future__ import annotations

import dataclasses

from lambdas.domain.incident import Incident
from truestep.contract import ResumeDirective


def directive_for(incident: Incident, existing: ResumeDirective | None, *, issued_at: str) -> ResumeDirective:
    """The directive of the incident's chosen checkpoint.

    existing: what lies there now. The same order of the same incident keeps its time, so that a repeated run writes
    nothing; after a relaunch that had succeeded it is issued anew, because a hold since then left a younger tombstone.
    The suspects' GPUs are banned only where a replacement was approved: after a rejection they may be used again.
    Raises ValueError where no checkpoint was chosen.
    """
    if incident.checkpoint is None:
        raise ValueError("a directive needs a chosen checkpoint")
    checkpoint = incident.checkpoint.checkpoint
    banned = sorted({uuid for suspect in incident.suspects for uuid in suspect.gpu_uuids}) if incident.approved else []
    directive = ResumeDirective(
        incident_id=incident.incident_id,
        checkpoint_uri=checkpoint.uri,
        manifest_sha256=checkpoint.manifest_sha256,
        max_step=checkpoint.step,
        banned_gpu_uuids=tuple(banned),
        issued_at=issued_at,
    )
    if existing is not None and incident.relaunch is None:
        kept = dataclasses.replace(directive, issued_at=existing.issued_at)
        if kept == existing:
            return kept
    return directive
