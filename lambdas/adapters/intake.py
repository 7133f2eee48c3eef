"""Carries out intake's decision: one incident a job, one execution an incident, however often an alarm arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lambdas.adapters.retrying import save_changed
from lambdas.domain.incident import Incident, IncidentStatus, incident_id, iso, job_of, open_incident, parse_iso
from lambdas.domain.intake import ACCUSING, IntakeAction, decide_intake, joined
from lambdas.domain.messages import accuses_nobody, arrived_late, joined_unheard
from lambdas.domain.outcome import Outcome
from lambdas.domain.policy import Policy
from lambdas.domain.records import TrainingAttempt
from lambdas.domain.verification import superseded
from lambdas.ports import Clock, Executions, IncidentStore, Notifier
from truestep.contract import Alarm

NOTIFIED = "notified"
REMEMBERED = 4096
"""Alarms that an instance remembers."""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """The ports that intake acts through."""

    store: IncidentStore
    executions: Executions
    notifier: Notifier
    clock: Clock
    taken: dict[str, str] = field(default_factory=dict)
    """Id of the incident that an alarm would open -> what it belongs to; kept as long as the instance lives."""

    def take(self, alarm: Alarm, policy: Policy) -> dict[str, Any]:
        """Act on a valid alarm; returns what was done, for the log.

        Every rank may report the same alarm. What this instance has taken in to the end costs no call when it comes
        again, so that a storm costs as many calls as it has alarms and instances.
        """
        name = incident_id(alarm)  # of job and alarm
        known = self.taken.get(name)
        if known is not None:
            return self._said(alarm, known, "this alarm was taken in before, by this instance")
        done = self._take(alarm, policy)
        self.taken[name] = str(done["incident_id"])
        while len(self.taken) > REMEMBERED:
            del self.taken[next(iter(self.taken))]
        return done

    def _take(self, alarm: Alarm, policy: Policy) -> dict[str, Any]:
        belongs_to = self.store.record_alarm(alarm, self.clock.now())
        if belongs_to == NOTIFIED:
            return self._said(alarm, NOTIFIED, "this alarm was announced before")
        if belongs_to is not None:
            # A repeat: an earlier delivery may have died between the claim and the start of the workflow.
            self._ensure_started(self.store.load(belongs_to))
            return self._said(alarm, belongs_to, "this alarm was received before")
        holder = self.store.holder(job_of(alarm))
        decision = decide_intake(alarm, holder, self.store.attempts(job_of(alarm)))
        if decision.action is IntakeAction.NOTIFY:
            accuses = alarm.verdict.kind in ACCUSING
            message = arrived_late(alarm, decision.reason) if accuses else accuses_nobody(alarm)
            self.notifier.notify(message.subject, message.text, attributes={"kind": str(alarm.verdict.kind)})
            self.store.assign_alarm(alarm, NOTIFIED)
            return self._said(alarm, NOTIFIED, decision.reason)
        if decision.action is IntakeAction.JOIN and holder is not None:
            incident = self._join(alarm, holder)
        else:
            incident = self._open(alarm, policy, holder)
        self._ensure_started(incident)
        self.store.assign_alarm(alarm, incident.incident_id)
        return self._said(alarm, incident.incident_id, decision.reason)

    def _join(self, alarm: Alarm, holder: Incident) -> Incident:
        now = self.clock.now()
        if joined(holder, alarm, now=now) is None:
            return holder
        if alarm.run.attempt_id != holder.alarm.run.attempt_id:
            # Before it is noted: who died in between tells people again.
            message = joined_unheard(holder, alarm)
            attributes = {"kind": "joined", "incident_id": holder.incident_id}
            self.notifier.notify(message.subject, message.text, attributes=attributes)
        return save_changed(self.store, holder.incident_id, lambda incident: joined(incident, alarm, now=now))

    def _open(self, alarm: Alarm, policy: Policy, holder: Incident | None) -> Incident:
        # The alarm may be the first that is heard of its attempt: the job's attempts are told apart by that order.
        now, raised = self.clock.now(), parse_iso(alarm.detected_at)
        sign = TrainingAttempt(attempt_id=alarm.run.attempt_id, heard_at=iso(now), seen_at=iso(min(now, raised)))
        self.store.record_attempt(job_of(alarm), sign)
        follows = holder.incident_id if holder is not None else ""
        fresh = open_incident(alarm, now=self.clock.now(), dry_run=policy.dry_run or alarm.drill, follows=follows)
        return self.store.open(fresh, taking_over=follows or None)

    def _ensure_started(self, incident: Incident) -> None:
        if incident.status is not IncidentStatus.OPEN:
            return
        if incident.follows:
            self._supersede(incident.follows, incident.incident_id)
        self.executions.start(incident.incident_id)

    def _supersede(self, earlier_id: str, incident_id: str) -> None:
        """The earlier incident must not go on waiting for its relaunch to succeed."""
        now = self.clock.now()

        def change(earlier: Incident) -> Incident | None:
            done = earlier.status is IncidentStatus.CLOSED or earlier.verification.problem
            return None if done else superseded(earlier, incident_id, now=now)

        earlier = save_changed(self.store, earlier_id, change)
        output = {
            "incident_id": earlier_id,
            "outcome": str(Outcome.ESCALATE),
            "reason": earlier.verification.problem,
        }
        self.executions.complete(earlier.verification.task_token, output)

    @staticmethod
    def _said(alarm: Alarm, belongs_to: str, reason: str) -> dict[str, Any]:
        return {"alarm_id": alarm.alarm_id, "incident_id": belongs_to, "reason": reason}
