"""Whether the resumed run is the one that was ordered, and whether it has proved itself."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Final

from lambdas.domain.incident import Incident, iso
from lambdas.domain.outcome import Outcome
from truestep.contract import DetailType, ResumeEvent

STATE: Final = "VerifyRecovery"
_ATTEMPTS_KEPT: Final = 100
"""A run that crashes again and again resumes as often."""


def heard(incident: Incident, event: ResumeEvent, detail_type: DetailType, *, now: datetime) -> Incident:
    """The incident with what a run that resumed for it said about itself.

    A run that resumed from another checkpoint than ordered is a problem even if its audits pass: its weights may be the
    corrupt ones, on healthy GPUs. What a run says that follows an earlier order than the newest proves nothing, however
    late it is heard. That a run is one of the incident's is kept in either case: its alarms say that it is not cured.
    """
    incident = _with_attempt(incident, event.run.attempt_id)
    said = f"{detail_type} at step {event.step} from {event.checkpoint.uri}"
    if incident.relaunch is not None and event.directive_sha256 in incident.relaunch.orders[:-1]:
        reason = f"does not count, attempt {event.run.attempt_id} follows an earlier order: {said}"
        return incident.noted(at=now, state="Training", outcome="earlier order", reason=reason)
    seen = incident.verification
    problem = seen.problem or _mismatch(incident, event)
    if detail_type is DetailType.RESUMED:
        seen = dataclasses.replace(seen, resumed_at=seen.resumed_at or iso(now), first_step=event.step)
    else:
        seen = dataclasses.replace(seen, verified_at=iso(now), verified_step=event.step)
    seen = dataclasses.replace(seen, checkpoint=event.checkpoint, nodes=event.nodes, problem=problem)
    word = "problem" if problem else ("resumed" if detail_type is DetailType.RESUMED else "verified")
    return incident.evolve(verification=seen).noted(at=now, state="Training", outcome=word, reason=problem or said)


def _with_attempt(incident: Incident, attempt_id: str) -> Incident:
    relaunch = incident.relaunch
    if relaunch is None or attempt_id in relaunch.attempts:
        return incident
    attempts = (*relaunch.attempts, attempt_id)[-_ATTEMPTS_KEPT:]
    return incident.evolve(relaunch=dataclasses.replace(relaunch, attempts=attempts))


def _mismatch(incident: Incident, event: ResumeEvent) -> str:
    if event.run.run_id != incident.alarm.run.run_id:
        return f"run {event.run.run_id} answered for run {incident.alarm.run.run_id}"
    relaunch = incident.relaunch
    ordered = relaunch.checkpoint if relaunch else None
    if relaunch is None or ordered is None:
        return "the run resumed before this incident had ordered it"
    if relaunch.orders[-1:] == (event.directive_sha256,) and event.checkpoint.step > ordered.step:
        # A restart under the same order: above the ordered step nothing but its own run's progress is loaded.
        return ""
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


def given_up(incident: Incident, *, waited_seconds: float, limit_seconds: float) -> Incident:
    """The incident, with the problem on record where nothing at all was heard in time of a run whose pods run.

    To wait on would tell nobody that its start has failed, or that its events do not arrive.
    """
    seen = incident.verification
    if seen.resumed_at or seen.verified_at or seen.problem or incident.dry_run or waited_seconds < limit_seconds:
        return incident
    problem = (
        f"the job's pods run, but no run has said within {limit_seconds:.0f} s that it resumed. Rank 0's log tells "
        "whether the start was refused: cure that, go on from StopTraining. Where it trains, its events do not arrive "
        "(dead letters? its outbox?): cure that, go on from VerifyRecovery"
    )
    return incident.evolve(verification=dataclasses.replace(seen, problem=problem))


def awaiting(incident: Incident, task_token: str) -> Incident:
    """The incident with the token that the run's answer completes."""
    return incident.evolve(verification=dataclasses.replace(incident.verification, task_token=task_token))
