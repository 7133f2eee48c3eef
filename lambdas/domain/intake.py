"""What to do with an alarm that arrives: notify, join the open incident, open one, or follow up a failed recovery."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from lambdas.domain.attempts import heard_at, overtaken_by
from lambdas.domain.errors import AlarmRefusedError
from lambdas.domain.incident import Incident, IncidentStatus, job_of, parse_iso
from lambdas.domain.records import TrainingAttempt
from truestep.contract import INCIDENT_ID, Alarm, RunRef, VerdictKind, canonical_bytes, training_source

_PART: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"(?=.{{1,253}}\Z){_PART}(\.{_PART})*")
_NAMES: Final = {
    "cluster_arn": re.compile(r"arn:[a-z0-9-]+:sagemaker:[a-z0-9-]+:[0-9]{12}:cluster/[A-Za-z0-9-]+"),
    "namespace": re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"),
    "job_name": _SUBDOMAIN,
    "job_kind": re.compile(r"[A-Za-z0-9]{1,63}"),
}
_JOINED: Final = "joined by alarm"
_JOINED_NOTED: Final = 16
"""Notes of alarms that joined an incident: a storm must not write it as often as it has alarms."""
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._/-]{1,128}")
"""Ids that become parts of keys and of names of files."""

MOST_BYTES: Final = 262_144
"""Of an alarm's record: what EventBridge takes of an event."""

ACCUSING = frozenset({VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS})
"""Verdicts that point at hardware. The others are for the people who own the training code."""


class IntakeAction(StrEnum):
    """What intake does with an alarm."""

    NOTIFY = "notify"
    JOIN = "join"
    OPEN = "open"
    FOLLOW_UP = "follow_up"
    """Open a new incident in place of the one whose relaunch led to this alarm."""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """The action and why."""

    action: IntakeAction
    reason: str


def check_source(source: str, run: RunRef, namespaces: Collection[str]) -> None:
    """Refuse an event that may not speak for its run: of a namespace that is not served, or sent as somebody else.

    Anyone in the account with events:PutEvents can send an event; IAM can pin a role to one source (``events:source``).
    namespaces: those that this deployment serves in the run's cluster. Raises `AlarmRefusedError`.
    """
    if run.namespace not in namespaces:
        raise AlarmRefusedError(
            f"namespace {run.namespace!r} is not among training_namespaces of cluster {run.cluster_arn} "
            f"({', '.join(namespaces)}): add it there, deploy and apply infra/kubernetes/namespace in it, or correct "
            "POD_NAMESPACE in the training pods"
        )
    expected = training_source(run.cluster_arn, run.namespace)
    if source != expected:
        raise AlarmRefusedError(
            f"event source {source[:300]!r} may not report for namespace {run.namespace!r} of cluster "
            f"{run.cluster_arn}; only {expected!r} may: bring the SDK in the image up to date, and attach to the pods' "
            "role the training policy of this cluster and namespace. If no pod of yours sent it, somebody tried to "
            "speak for this job: see whose policies allow events:PutEvents on the bus"
        )


def check_run(run: RunRef) -> None:
    """Refuse an event that names no job: nothing could be stopped or relaunched for it.

    The names become keys and API paths, so they must be names that Kubernetes allows. Raises `AlarmRefusedError`.
    """
    missing = [name for name, allowed in _NAMES.items() if not allowed.fullmatch(getattr(run, name))]
    if missing:
        raise AlarmRefusedError(
            f"the event of run {run.run_id!r} has no valid {', '.join(missing)}: set TRUESTEP_CLUSTER_ARN, "
            "POD_NAMESPACE, TRUESTEP_JOB_NAME and TRUESTEP_JOB_KIND in the training pods"
        )


def check_alarm(alarm: Alarm) -> None:
    """Refuse an alarm whose id cannot be a key, whose time cannot be read, or which no table would take.

    Numbers and escapes may take more room in a record than they took on the way. Raises `AlarmRefusedError`.
    """
    if not _IDENTIFIER.fullmatch(alarm.alarm_id):
        raise AlarmRefusedError(f"alarm_id {alarm.alarm_id[:80]!r} is not 1 to 128 letters, digits, dots or dashes")
    check_time("detected_at", alarm.detected_at)
    check_rows(alarm)
    if (size := len(canonical_bytes(alarm))) > MOST_BYTES:
        raise AlarmRefusedError(f"the alarm takes {size} bytes as it is kept, and {MOST_BYTES} are the most")


def check_incident_id(incident_id: str) -> None:
    """Refuse what is no incident's id. Raises `AlarmRefusedError`."""
    if not INCIDENT_ID.fullmatch(incident_id):
        raise AlarmRefusedError(f"{incident_id[:80]!r} is no incident's id (inc- and 16 hex digits)")


def check_time(field: str, text: str) -> None:
    """Refuse a time that is not ISO 8601: races are decided by it. Raises `AlarmRefusedError`."""
    try:
        parse_iso(text)
    except ValueError as error:
        raise AlarmRefusedError(f"{field} {text[:80]!r} is no ISO 8601 time: {error}") from error


def check_rows(alarm: Alarm) -> None:
    """Refuse rows whose names are none that Kubernetes allows, or that point out of the job's own namespace.

    The recovery asks the cluster for these nodes and pods with rights of its own. Raises
    `AlarmRefusedError`.
    """
    for row in (*alarm.suspects, *alarm.witnesses):
        for field, name, required in (("node_name", row.node_name, True), ("pod_name", row.pod_name, False)):
            if (name or required) and not _SUBDOMAIN.fullmatch(name):
                raise AlarmRefusedError(
                    f"rank {row.rank}'s {field} {name!r} is no name that Kubernetes allows: set NODE_NAME and POD_NAME "
                    "in the training pods from the downward API"
                )
        if row.gpu_uuid and not _IDENTIFIER.fullmatch(row.gpu_uuid):
            raise AlarmRefusedError(f"rank {row.rank}'s gpu_uuid {row.gpu_uuid[:80]!r} is no GPU's UUID")
        if row.namespace not in ("", alarm.run.namespace):
            raise AlarmRefusedError(
                f"rank {row.rank} is said to run in namespace {row.namespace!r}, but the job's is "
                f"{alarm.run.namespace!r}: an alarm speaks for its own job alone"
            )


def decide_intake(alarm: Alarm, holder: Incident | None, attempts: tuple[TrainingAttempt, ...] = ()) -> Intake:
    """What to do with a valid alarm, given the incident that holds its job.

    Every rank's copy and every further alarm of the same attempt joins. An alarm of a run that the incident relaunched
    says that the recovery did not cure it: that is a new incident, and the old one must not go on waiting for a
    success. Alarms of earlier attempts that arrive late (outbox) still join. Where there is nothing to join, and the
    job has trained on since, people are told: stopping that run would undo what they did to repair it.

    attempts: of the job, in the order in which they were heard of.
    """
    if alarm.verdict.kind not in ACCUSING:
        return Intake(
            action=IntakeAction.NOTIFY,
            reason=f"a {alarm.verdict.kind} verdict accuses no hardware: {alarm.verdict.reason}",
        )
    joins = holder is not None and not _is_recurrence(alarm, holder, attempts)
    later = None if joins else overtaken_by(alarm, attempts)
    if later is not None:
        return Intake(
            action=IntakeAction.NOTIFY,
            reason=f"arrived late: attempt {later.attempt_id} of this job was training at {later.seen_at}, after it",
        )
    if holder is None:
        return Intake(action=IntakeAction.OPEN, reason=f"no open incident of job {job_of(alarm).name}")
    if not joins:
        return Intake(
            action=IntakeAction.FOLLOW_UP,
            reason=f"raised by a run that incident {holder.incident_id} had relaunched",
        )
    return Intake(action=IntakeAction.JOIN, reason=f"incident {holder.incident_id} of this job is open")


def joined(incident: Incident, alarm: Alarm, *, now: datetime) -> Incident | None:
    """The incident with the note of an alarm that joined it; None where that says nothing new, or enough is noted.

    New is an attempt, or a GPU, that the incident is not about. The alarms themselves are kept beside the incident.
    """
    suspected = {uuid for suspect in incident.suspects for uuid in (suspect.node_name, *suspect.gpu_uuids)}
    strangers = [row for row in alarm.suspects if (row.gpu_uuid or row.node_name) not in suspected]
    own = alarm.run.attempt_id == incident.alarm.run.attempt_id
    if own and not strangers:
        return None
    accused = ", ".join(f"{row.node_name} ({row.gpu_uuid or 'GPU unknown'})" for row in alarm.suspects[:2]) or "nobody"
    reason = f"an alarm of {'this' if own else 'another'} attempt, {alarm.run.attempt_id[:36]}, accuses {accused}"
    noted = [entry.reason for entry in incident.timeline if entry.outcome.startswith(_JOINED)]
    if len(noted) >= _JOINED_NOTED or any(reason.startswith(earlier) for earlier in noted):
        return None
    return incident.noted(at=now, state="Intake", outcome=f"{_JOINED} {alarm.alarm_id[:12]}", reason=reason)


def _is_recurrence(alarm: Alarm, holder: Incident, attempts: tuple[TrainingAttempt, ...]) -> bool:
    """Whether a run that the incident relaunched raised the alarm.

    It said so when it resumed, or was first heard of after the order. Where the alarm is the first that is heard of its
    attempt it is such a run's, unless it is older than the incident's own: swallowed, nobody would hear of it.
    """
    if holder.status is IncidentStatus.CLOSED:
        return True
    attempt_id = alarm.run.attempt_id
    if holder.relaunch is None or attempt_id == holder.alarm.run.attempt_id:
        return False
    if attempt_id in holder.relaunch.attempts:
        return True
    if first := heard_at(attempts, attempt_id):
        return parse_iso(first) > parse_iso(holder.relaunch.at)
    return parse_iso(alarm.detected_at) >= parse_iso(holder.alarm.detected_at)
