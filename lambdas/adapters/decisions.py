"""Carries out what a link's holder decides: recorded once, then the waiting state goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import parse_qs, quote

from lambdas.adapters.escalations import go_on
from lambdas.adapters.retrying import save_changed
from lambdas.domain.approval import decided, decision_refused, settled
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.workflow import resume_refused, resumed
from lambdas.pages import render_incident
from lambdas.ports import Clock, Executions, IncidentStore, Links
from lambdas.settings import Settings

Form: TypeAlias = Mapping[str, str]

_FORM_LIMIT_BYTES = 10_000


def form_of(body: bytes) -> Form:
    """The fields of an ``application/x-www-form-urlencoded`` body; of a repeated field the first.

    Raises ValueError for a body that the page's form does not send: too long, too many fields, no UTF-8.
    """
    if len(body) > _FORM_LIMIT_BYTES:
        raise ValueError(f"{len(body)} bytes, where the page's form has at most {_FORM_LIMIT_BYTES}")
    return {name: values[0] for name, values in parse_qs(body.decode(), max_num_fields=20, errors="strict").items()}


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The ports that the page acts through. Every method checks the link first, and returns HTTP status and page."""

    settings: Settings
    store: IncidentStore
    links: Links
    executions: Executions
    clock: Clock

    def show(self, incident_id: str, query: Mapping[str, str]) -> tuple[int, str]:
        """The incident as it is."""
        self.links.verify(incident_id, query, now=self.clock.now())
        incident = self.store.load(incident_id)
        return 200, self._page(incident, query, target=f"{quote(incident_id, safe='')}/decision")

    def decide(self, incident_id: str, query: Mapping[str, str], body: bytes, *, by: str) -> tuple[int, str]:
        """Record a decision. The first one stands; another answers 409 and changes nothing."""
        self.links.verify(incident_id, query, now=self.clock.now())
        try:
            form = form_of(body)
        except ValueError as error:
            incident = self.store.load(incident_id)
            return 400, self._page(incident, query, f"Nothing was decided: the form cannot be read ({error}).")
        word = form.get("decision", "")
        if word == "resume":
            return self._resume(incident_id, query, form.get("resume_from", ""), by)
        if word not in ("approve", "reject"):
            incident = self.store.load(incident_id)
            return 400, self._page(incident, query, "Nothing was decided: press one of the buttons.")
        approve = word == "approve"
        refusals: list[str] = []

        def change(incident: Incident) -> Incident | None:
            policy = self.settings.policy(incident.job.cluster_arn)
            acknowledged = form.get("acknowledge") == "yes"
            refused = decision_refused(
                incident, approve=approve, acknowledged=acknowledged, by_link=True, policy=policy
            )
            refusals[:] = [refused] if refused else []
            if refused:
                return None
            now = self.clock.now()
            changed = decided(incident, approve=approve, by=by, comment=form.get("comment", ""), now=now)
            # Nobody answered in time, and the incident waits in Escalate: the answer leads back to the question.
            waits = incident.status is IncidentStatus.ESCALATED
            return resumed(changed, "RequestApproval", by=by, now=now) if waits else changed

        incident = save_changed(self.store, incident_id, change)
        self._complete(incident)
        if refusals:
            return 409, self._page(incident, query, f"Not recorded: {refusals[0]}.")
        return 200, self._page(incident, query, f"Recorded: {'approved' if approve else 'rejected'}.")

    def _resume(self, incident_id: str, query: Mapping[str, str], state: str, by: str) -> tuple[int, str]:
        refusals: list[str] = []

        def change(incident: Incident) -> Incident | None:
            refused = resume_refused(incident, state)
            refusals[:] = [refused] if refused else []
            return None if refused else resumed(incident, state, by=by, now=self.clock.now())

        incident = save_changed(self.store, incident_id, change)
        self._complete(incident)
        if refusals:
            return 409, self._page(incident, query, f"Not done: {refusals[0]}.")
        return 200, self._page(incident, query, f"Going on from {state}.")

    def _complete(self, incident: Incident) -> None:
        """Let the waiting state go on. Harmless when repeated, and repeated on every post: a first one may have died
        between the record and this.
        """
        escalation = incident.escalation
        if incident.status is IncidentStatus.ESCALATED and escalation is not None and escalation.resume_from:
            go_on(self.store, self.executions, incident)
            return
        approval = incident.approval
        known = settled(incident, now=self.clock.now())
        if approval is not None and approval.decision is not None and known is not None:
            output = {"incident_id": incident.incident_id, "outcome": str(known[0]), "reason": known[1]}
            self.executions.complete(approval.task_token, output)

    def _page(self, incident: Incident, query: Mapping[str, str], notice: str = "", *, target: str = "decision") -> str:
        policy = self.settings.policy(incident.job.cluster_arn)
        kept = {name: query.get(name, "") for name in ("scope", "expires", "signature")}
        return render_incident(incident, policy=policy, query=kept, target=target, now=self.clock.now(), notice=notice)
