"""The in-memory twin of the table: what the store promises, in the fewest lines. It passes the same suite."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime

from lambdas.domain.attempts import with_sign
from lambdas.domain.breaker import ClaimAnswer
from lambdas.domain.errors import ConcurrentUpdateError, IncidentNotFoundError
from lambdas.domain.incident import Incident, IncidentStatus, job_of
from lambdas.domain.records import JobKey, PastIncident, TrainingAttempt
from lambdas.ports import RecordedCheckpoint, SeenJob
from truestep.contract import Alarm, CheckpointEvent

_RANK = {"written": 0, "trusted": 1, "revoked": 2}


class MemoryIncidentStore:
    """`lambdas.ports.IncidentStore` in dictionaries."""

    def __init__(self) -> None:
        self.alarms: dict[tuple[JobKey, str], str | None] = {}
        self.incidents: dict[str, Incident] = {}
        self.jobs: dict[JobKey, str] = {}
        self.nodes: dict[str, tuple[str, str]] = {}
        self.gpus: dict[str, dict[str, PastIncident]] = {}
        self.lock = threading.Lock()
        self.known: dict[JobKey, tuple[TrainingAttempt, ...]] = {}
        self.kept: dict[tuple[JobKey, int, str], RecordedCheckpoint] = {}

    def record_alarm(self, alarm: Alarm, received_at: datetime) -> str | None:
        return self.alarms.setdefault((job_of(alarm), alarm.alarm_id), None)

    def assign_alarm(self, alarm: Alarm, incident_id: str) -> None:
        key = job_of(alarm), alarm.alarm_id
        self.alarms[key] = self.alarms.get(key) or incident_id

    def alarms_of(self, incident: Incident) -> tuple[str, ...]:
        joined = {alarm_id for (_, alarm_id), owner in self.alarms.items() if owner == incident.incident_id}
        return tuple(sorted({incident.alarm.alarm_id} | joined))

    def open(self, incident: Incident, *, taking_over: str | None = None) -> Incident:
        if incident.incident_id in self.incidents:
            return self.incidents[incident.incident_id]
        holder = self.jobs.get(incident.job)
        if holder is not None and holder != taking_over:
            return self.incidents[holder]
        self.jobs[incident.job] = incident.incident_id
        self.incidents[incident.incident_id] = incident.evolve(version=1)
        return self.incidents[incident.incident_id]

    def holder(self, job: JobKey) -> Incident | None:
        return self.incidents[self.jobs[job]] if job in self.jobs else None

    def job_holder(self, job: JobKey) -> str:
        return self.jobs.get(job, "")

    def load(self, incident_id: str) -> Incident:
        try:
            return self.incidents[incident_id]
        except KeyError:
            raise IncidentNotFoundError(incident_id) from None

    def save(self, incident: Incident) -> Incident:
        stored = self.incidents.get(incident.incident_id)
        if stored is None or stored.version != incident.version:
            raise ConcurrentUpdateError(incident.incident_id)
        self.incidents[incident.incident_id] = incident.evolve(version=incident.version + 1)
        return self.incidents[incident.incident_id]

    def claim_nodes(self, incident_id: str, cluster_arn: str, node_keys: Sequence[str], *, limit: int) -> ClaimAnswer:
        if not 1 <= len(set(node_keys)) <= 64:
            raise ValueError("1 to 64 nodes")
        for key in node_keys:
            if key in self.nodes and self.nodes[key][0] != incident_id:
                return ClaimAnswer(granted=False, reason=f"{key} is held by incident {self.nodes[key][0]}")
        wanted = set(node_keys) - set(self.nodes)
        if wanted and len(self.quarantined(cluster_arn)) + len(wanted) > limit:
            return ClaimAnswer(granted=False, reason=f"circuit breaker: the limit of {limit}")
        self.nodes.update(dict.fromkeys(wanted, (incident_id, cluster_arn)))
        return ClaimAnswer(granted=True, reason="claimed")

    def release_nodes(self, incident_id: str, cluster_arn: str, node_keys: Sequence[str]) -> None:
        for key in node_keys:
            if self.nodes.get(key, ("", ""))[0] == incident_id:
                del self.nodes[key]

    def quarantined(self, cluster_arn: str) -> frozenset[str]:
        return frozenset(key for key, (_, arn) in self.nodes.items() if arn == cluster_arn)

    def node_holder(self, key: str) -> str | None:
        return self.nodes[key][0] if key in self.nodes else None

    def release_job(self, incident: Incident) -> None:
        if self.jobs.get(incident.job) == incident.incident_id:
            del self.jobs[incident.job]

    def record_gpus(self, incident: Incident) -> None:
        for suspect in incident.suspects:
            for gpu_uuid in suspect.gpu_uuids:
                self.gpus.setdefault(gpu_uuid, {})[incident.incident_id] = PastIncident(
                    incident_id=incident.incident_id,
                    gpu_uuid=gpu_uuid,
                    node_name=suspect.node_name,
                    verdict_kind=str(incident.alarm.verdict.kind),
                    at=incident.opened_at,
                )

    def gpu_history(self, gpu_uuid: str, *, limit: int = 20) -> tuple[PastIncident, ...]:
        past = self.gpus.get(gpu_uuid, {}).values()
        return tuple(sorted(past, key=lambda entry: entry.at, reverse=True)[:limit])

    def record_attempt(self, job: JobKey, attempt: TrainingAttempt) -> None:
        with self.lock:
            self.known[job] = with_sign(self.attempts(job), attempt)

    def attempts(self, job: JobKey) -> tuple[TrainingAttempt, ...]:
        return self.known.get(job, ())

    def record_checkpoint(self, job: JobKey, event: CheckpointEvent, trust: str) -> None:
        if trust not in _RANK:
            raise ValueError(f"no such trust: {trust!r}")
        key = (job, int(event.checkpoint.step), event.checkpoint.manifest_sha256[:12])
        if key not in self.kept or _RANK[trust] >= _RANK[self.kept[key].trust]:
            self.kept[key] = RecordedCheckpoint(event=event, trust=trust)

    def checkpoints(self, job: JobKey) -> tuple[RecordedCheckpoint, ...]:
        return tuple(self.kept[key] for key in sorted((k for k in self.kept if k[0] == job), key=lambda k: k[1:])[::-1])

    def newest_trusted(self, job: JobKey, *, among: int) -> CheckpointEvent | None:
        return next((one.event for one in self.checkpoints(job)[:among] if one.trust == "trusted"), None)

    def open_incident_ids(self) -> tuple[str, ...]:
        newest = self.recent_incident_ids(len(self.incidents))
        return tuple(name for name in newest if self.incidents[name].status is not IncidentStatus.CLOSED)

    def recent_incident_ids(self, limit: int) -> tuple[str, ...]:
        newest = sorted(self.incidents.values(), key=lambda one: one.opened_at, reverse=True)
        return tuple(one.incident_id for one in newest[:limit])

    def recent_jobs(self, limit: int) -> tuple[SeenJob, ...]:
        seen = [SeenJob(job=job, seen_at=max(one.seen_at for one in known)) for job, known in self.known.items()]
        return tuple(sorted(seen, key=lambda one: one.seen_at, reverse=True)[:limit])
