"""The order to resume that a relaunch puts where the pods mount it. Pure."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Final

from lambdas.domain.incident import Incident, iso
from lambdas.domain.records import Relaunch, Verification
from truestep.contract import ResumeDirective, directive_sha256

_ORDERS_KEPT: Final = 100
"""One is issued each time that a person lets the incident go on."""


def directive_for(incident: Incident, *, answers: tuple[str, ...], issued_at: str) -> ResumeDirective:
    """The directive of the incident's chosen checkpoint.

    answers: ids of the incident's alarms; over the tombstone of another one nothing starts. The suspects' GPUs are
    banned only where a replacement was approved: after a rejection they may be used again.
    Raises ValueError where no checkpoint was chosen.
    """
    if incident.checkpoint is None:
        raise ValueError("a directive needs a chosen checkpoint")
    checkpoint = incident.checkpoint.checkpoint
    banned = sorted({uuid for suspect in incident.suspects for uuid in suspect.gpu_uuids}) if incident.approved else []
    return ResumeDirective(
        incident_id=incident.incident_id,
        checkpoint_uri=checkpoint.uri,
        manifest_sha256=checkpoint.manifest_sha256,
        max_step=checkpoint.step,
        banned_gpu_uuids=tuple(banned),
        answers_alarm_ids=answers,
        issued_at=issued_at,
    )


def standing_order(
    incident: Incident, existing: ResumeDirective | None, *, waiting: bool, unfinished: bool
) -> ResumeDirective | None:
    """The incident's newest order, where it stands; None where a new one is to be issued.

    existing: what lies there now. waiting: Relaunch has looked before, and waits for the pods. unfinished: the job has
    pods that have not finished. An order stands while it is waited for, and as long as the run that follows it runs. A
    run that has ended since may have left a tombstone of an alarm that the order does not answer; while one runs, an
    alarm that joins the incident makes no other order of it. Nor does another choice of a checkpoint, once the run has
    said that it resumed; but a run that resumed from elsewhere is not left alone.
    """
    relaunch = incident.relaunch
    if existing is None or relaunch is None or relaunch.orders[-1:] != (directive_sha256(existing),):
        return None
    directive = directive_for(incident, answers=existing.answers_alarm_ids, issued_at=relaunch.at)
    if incident.verification.resumed_at:
        directive = dataclasses.replace(
            directive,
            checkpoint_uri=existing.checkpoint_uri,
            manifest_sha256=existing.manifest_sha256,
            max_step=existing.max_step,
        )
    stands = waiting or (unfinished and not incident.verification.problem)
    return directive if stands and directive == existing else None


def newly_ordered(incident: Incident, *, answers: tuple[str, ...], now: datetime) -> tuple[Incident, ResumeDirective]:
    """A new order, and the incident with it on record: nothing is heard yet of a run that follows it.

    answers: as `directive_for`'s.
    """
    directive = directive_for(incident, answers=answers, issued_at=iso(now))
    earlier = incident.relaunch or Relaunch(at="")
    relaunch = dataclasses.replace(
        earlier,
        at=directive.issued_at,
        orders=(*earlier.orders, directive_sha256(directive))[-_ORDERS_KEPT:],
        checkpoint=incident.checkpoint.checkpoint if incident.checkpoint else None,
    )
    return incident.evolve(relaunch=relaunch, verification=Verification()), directive


def withdrawn(incident: Incident, *, now: datetime) -> Incident:
    """The incident without a standing order: what its pods follow is not what it orders now."""
    if incident.relaunch is None:
        return incident
    return incident.evolve(relaunch=dataclasses.replace(incident.relaunch, at=iso(now)))
