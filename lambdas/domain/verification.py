"""Whether the resumed run is the one that was ordered, and whether it has proved itself."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from lambdas.domain.incident import Incident, iso
from lambdas.domain.outcome import Outcome
from truestep.contract import DetailType, ResumeEvent


def heard(incident: Incident, event: ResumeEvent, detail_type: DetailType, *, now: datetime) -> Incident:
    """The incident with what the resumed run said about itself.

    A run that resumed from another checkpoint than ordered is a problem even if its audits pass: its weights may be the
    corrupt ones, on healthy GPUs.
    """
    seen = incident.verification
    problem = seen.problem or _mismatch(incident, event)
    if detail_type is DetailType.RESUMED:
        seen = dataclasses.replace(seen, resumed_at=iso(now), first_step=event.step)
    else:
        seen = dataclasses.replace(seen, verified_at=iso(now), verified_step=event.step)
    seen = dataclasses.replace(seen, checkpoint=event.checkpoint, nodes=event.nodes, problem=problem)
    reason = problem or f"{detail_type} at step {event.step} from {event.checkpoint.uri}"
    word = "problem" if problem else ("resumed" if detail_type is DetailType.RESUMED else "verified")
    return incident.evolve(verification=seen).noted(at=now, state="Training", outcome=word, reason=reason)


def _mismatch(incident: Incident, event: ResumeEvent) -> str:
    if event.run.run_id != incident.alarm.run.run_id:
        return f"run {event.run.run_id} answered for run {incident.alarm.run.run_id}"
    chosen = incident.checkpoint
    if chosen is None:
        return "the run resumed before this incident had chosen a checkpoint"
    ordered = chosen.checkpoint
    if event.checkpoint.manifest_sha256 != ordered.manifest_sha256:
        return (
            f"the run resumed from {event.checkpoint.uri} (manifest {event.checkpoint.manifest_sha256[:12]}) where "
            f"{ordered.uri} ({ordered.manifest_sha256[:12]}) was ordered"
        )
    return ""


def superseded(incident: Incident, by: str, *, now: datetime) -> Incident:
    """The incident with the note that its relaunch led to a new alarm: it will not be verified."""
    problem = f"the relaunched job raised a new alarm, which is incident {by}"
    seen = dataclasses.replace(incident.verification, problem=problem)
    return incident.evolve(verification=seen).noted(at=now, state="Intake", outcome="superseded", reason=problem)


def verdict_on_recovery(incident: Incident) -> tuple[Outcome, str] | None:
    """The outcome of VerifyRecovery if there is one already, and why; None while the run still has to prove itself."""
    seen = incident.verification
    if seen.problem:
        return Outcome.ESCALATE, seen.problem
    if incident.dry_run:
        return Outcome.VERIFIED, "dry run: nothing was relaunched, so there is nothing to verify"
    if seen.verified_at:
        return Outcome.VERIFIED, f"the first audit since the resume passed at step {seen.verified_step}"
    return None


def awaiting(incident: Incident, task_token: str) -> Incident:
    """The incident with the token that the run's answer completes."""
    return incident.evolve(verification=dataclasses.replace(incident.verification, task_token=task_token))
