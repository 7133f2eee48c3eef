"""Revokes the checkpoints of a suspect window, on the storage and in the table."""

from __future__ import annotations

from lambdas.adapters.runtime import Work
from lambdas.domain.checkpoint_choice import Choice, newest_clean_step
from lambdas.domain.incident import iso
from lambdas.ports import CheckpointCatalog
from truestep.contract import CheckpointEvent


def revoke_all(work: Work, catalogue: CheckpointCatalog, choice: Choice) -> None:
    """Write both marks for every checkpoint that the choice revokes. Twice is once; a dry run writes neither."""
    incident = work.incident
    if incident.dry_run or not choice.to_revoke:
        return
    clean = newest_clean_step(incident.alarm)
    reason = f"written after step {clean}, the last clean one, inside the window in which a GPU computed wrong"
    reported = {entry.event.checkpoint: entry.event for entry in work.store.checkpoints(incident.job)}
    for checkpoint in choice.to_revoke:
        catalogue.revoke(checkpoint, incident_id=incident.incident_id, reason=reason, at=iso(work.now))
        # One that no event reported is recorded too, so that a late "trusted" cannot bring it back.
        unreported = CheckpointEvent(run=incident.alarm.run, checkpoint=checkpoint, weights_fingerprint="")
        work.store.record_checkpoint(incident.job, reported.get(checkpoint, unreported), "revoked")
