"""The incident: what the recovery concluded from an alarm and did about it. Frozen; every change makes a new one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from enum import StrEnum
from typing import Any

from lambdas.domain.records import (
    Approval,
    CheckpointChoice,
    Confirmation,
    Escalation,
    Evidence,
    HealthCheck,
    JobKey,
    PastIncident,
    Recommendation,
    Relaunch,
    SuspectNode,
    TimelineEntry,
    Verification,
    Workload,
)
from truestep.contract import Alarm, IncidentId, from_json, sha256_hex, to_json

INCIDENT_SCHEMA_VERSION = 1
TIMELINE_LIMIT = 150
"""Entries kept; a person reads the newest."""
_REASON_BYTES = 400
"""Of a reason as it is stored. With an alarm of 256 KB, EventBridge's limit, the item stays below DynamoDB's 400 KB."""


class IncidentStatus(StrEnum):
    """Where the incident stands, for people and for filters; the state machine does not branch on it."""

    OPEN = "open"
    """Recorded by intake; the workflow has not taken it up."""
    INVESTIGATING = "investigating"
    AWAITING_APPROVAL = "awaiting_approval"
    RECOVERING = "recovering"
    VERIFYING = "verifying"
    ESCALATED = "escalated"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Everything about one incident. Stored as one item; `version` is its optimistic lock."""

    schema_version: int = INCIDENT_SCHEMA_VERSION
    incident_id: str
    version: int = 0
    """Of the stored record: 0 before the first write. Set by the store alone."""
    status: IncidentStatus = IncidentStatus.OPEN
    opened_at: str
    closed_at: str = ""
    job: JobKey
    alarm: Alarm
    execution: str = ""
    """ARN of the execution that drives it, the only one that may act; of the one that drove it last, once that ended.
    Empty until a state of one was entered."""
    dry_run: bool = False
    """Fixed when the incident opens: nothing in AWS or Kubernetes is changed for it."""
    follows: str = ""
    """Id of the incident whose relaunch led to this alarm."""
    suspects: tuple[SuspectNode, ...] = ()
    cleared: tuple[SuspectNode, ...] = ()
    """Suspects of the alarm that the confirmation gave back: another of them was singled out."""
    workload: Workload | None = None
    """What the confirmation runs with; None until the suspects are resolved, and where no pod was left to read."""
    evidence: Evidence | None = None
    history: tuple[PastIncident, ...] = ()
    confirmation: Confirmation | None = None
    health_check: HealthCheck | None = None
    recommendation: Recommendation | None = None
    approval: Approval | None = None
    checkpoint: CheckpointChoice | None = None
    relaunch: Relaunch | None = None
    verification: Verification = field(default_factory=Verification)
    escalation: Escalation | None = None
    waiting_since: Mapping[str, str] = field(default_factory=dict)
    """State name -> when it first answered ``pending`` or ``waiting``; dropped when it answers anything else. It
    bounds the waits."""
    found_stopped_at: str = ""
    """When StopTraining last found a job stopped that may start again by itself; empty once it was looked at again."""
    timeline: tuple[TimelineEntry, ...] = ()

    def evolve(self, **changes: Any) -> Incident:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    def with_suspect(self, suspect: SuspectNode) -> Incident:
        """A copy in which the suspect of the same node name is replaced by this one."""
        return self.evolve(
            suspects=tuple(suspect if old.node_name == suspect.node_name else old for old in self.suspects)
        )

    def noted(self, *, at: datetime, state: str, outcome: str, reason: str) -> Incident:
        """A copy with a timeline entry. Repeating the last entry's state and outcome only counts it up."""
        entry = TimelineEntry(at=iso(at), state=state, outcome=outcome, reason=cut(reason, _REASON_BYTES))
        waiting = {name: since for name, since in self.waiting_since.items() if name != state}
        if outcome in ("pending", "waiting"):
            waiting[state] = self.waiting_since.get(state, iso(at))
        earlier = self.timeline
        if earlier and (earlier[-1].state, earlier[-1].outcome) == (state, outcome):
            entry = dataclasses.replace(entry, attempts=earlier[-1].attempts + 1)
            earlier = earlier[:-1]
        kept = (*earlier, entry)
        if len(kept) > TIMELINE_LIMIT:
            # The opening stays: it says why all the rest happened.
            kept = (kept[0], *kept[-(TIMELINE_LIMIT - 1) :])
        return self.evolve(timeline=kept, waiting_since=waiting)

    def waited_seconds(self, state: str, now: datetime) -> float:
        """Seconds since `state` first answered that it waits; 0 where it has not."""
        since = self.waiting_since.get(state)
        return 0.0 if since is None else max(0.0, (now - parse_iso(since)).total_seconds())

    @property
    def approved(self) -> bool:
        """Whether a person approved the replacement."""
        return bool(self.approval and self.approval.decision and self.approval.decision.approved)

    @property
    def rejected(self) -> bool:
        """Whether a person rejected the accusation."""
        return bool(self.approval and self.approval.decision and not self.approval.decision.approved)

    def to_json(self) -> dict[str, Any]:
        """The full record, secrets included: for the table only."""
        document: dict[str, Any] = to_json(self)
        return document

    def to_public_json(self) -> dict[str, Any]:
        """The record without task tokens: for reports, logs and pages."""
        document = self.to_json()
        for part in ("approval", "verification", "escalation"):
            if document[part]:
                document[part].pop("task_token", None)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Incident:
        """Raises `ContractError` for a record that does not fit."""
        return from_json(cls, document)


def open_incident(alarm: Alarm, *, now: datetime, dry_run: bool, follows: str = "") -> Incident:
    """The incident that an alarm opens. Its id follows from the alarm: a retry makes the same one."""
    job = job_of(alarm)
    return Incident(
        incident_id=incident_id(alarm),
        opened_at=iso(now),
        job=job,
        alarm=alarm,
        dry_run=dry_run,
        follows=follows,
        suspects=suspects_of(alarm),
    ).noted(at=now, state="Intake", outcome="opened", reason=alarm.verdict.reason)


def incident_id(alarm: Alarm) -> IncidentId:
    """``inc-`` and 16 hex digits; also the name of the workflow's execution."""
    return IncidentId("inc-" + sha256_hex([str(job_of(alarm)), alarm.alarm_id])[:16])


def job_of(alarm: Alarm) -> JobKey:
    """Which job the alarm is about."""
    run = alarm.run
    return JobKey(
        cluster_arn=run.cluster_arn,
        namespace=run.namespace,
        kind=run.job_kind,
        name=run.job_name,
        drill=alarm.drill,
    )


def suspects_of(alarm: Alarm) -> tuple[SuspectNode, ...]:
    """The suspect rows gathered by node, in order of rank."""
    nodes: dict[str, SuspectNode] = {}
    for row in sorted(alarm.suspects, key=lambda row: row.rank):
        seen = nodes.get(row.node_name, SuspectNode(node_name=row.node_name))
        nodes[row.node_name] = dataclasses.replace(
            seen,
            ranks=(*seen.ranks, row.rank),
            gpu_uuids=_appended(seen.gpu_uuids, row.gpu_uuid),
            pod_names=_appended(seen.pod_names, row.pod_name),
        )
    return tuple(nodes.values())


def _appended(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return names if not name or name in names else (*names, name)


def cut(text: str, limit_bytes: int) -> str:
    """The beginning of the text that takes at most so many bytes as JSON in UTF-8, without the quotes."""
    taken = 0
    for place, character in enumerate(text):
        taken += len(json.dumps(character, ensure_ascii=False).encode("utf-8", "surrogatepass")) - 2
        if taken > limit_bytes:
            return text[:place]
    return text


def iso(at: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond. Raises ValueError for a naive time."""
    if at.tzinfo is None:
        raise ValueError("a time without a zone: pass datetime.now(UTC)")
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_iso(text: str) -> datetime:
    """The time that `iso` wrote, in UTC. Raises ValueError where `text` is none.

    Also within days of the calendar's ends: no arithmetic with a time of ours leaves it.
    """
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if not MINYEAR + 1 < at.year < MAXYEAR - 1:
        raise ValueError(f"year {at.year} is out of range")
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
