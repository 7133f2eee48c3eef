"""Carries out what a link's holder decides: recorded once, then the waiting state goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias
from urllib.parse import parse_qs, quote, urlencode

from botocore.exceptions import ClientError

from lambdas.adapters.escalations import go_on, go_on_anew
from lambdas.adapters.retrying import save_changed
from lambdas.domain.approval import decided, decision_refused, postpone_refused, postponed, reason_missing, settled
from lambdas.domain.decision import digest_of, shown_digest, signed
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.policy import Policy
from lambdas.domain.workflow import question_state, resume_refused, resumed
from lambdas.pages import render_incident, render_notice
from lambdas.pages.charts import charts_of, draw, draw_unreadable
from lambdas.pages.view import FOLLOW_SECONDS, moves
from lambdas.ports import Clock, DecisionSigner, Executions, IncidentStore, Links
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


_HTML = "text/html; charset=utf-8"
_WORDS = frozenset({"approve", "reject", "later", "resume"})
_SIGNED = ("scope", "expires", "signature")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the browser gets."""

    status: int
    body: str
    content_type: str = _HTML
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Deed:
    """What became of a decision: 200 recorded, 400 no decision or no reason for a rejection, 409 refused and why."""

    status: int
    incident: Incident
    notice: str = ""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The ports that the page acts through. Every method checks the link first."""

    settings: Settings
    store: IncidentStore
    links: Links
    signer: DecisionSigner
    executions: Executions
    clock: Clock
    evidence: Callable[[str], Mapping[str, Any]]
    """Reads the evidence at a URI, as `lambdas.adapters.metrics_evidence.read_evidence` does."""

    def show(self, incident_id: str, query: Mapping[str, str]) -> Reply:
        """The incident as it is. With ``follow=yes`` the browser is told to load it again, while there is progress."""
        self.links.verify(incident_id, query, now=self.clock.now())
        incident = self.store.load(incident_id)
        follow = query.get("follow") == "yes" and moves(incident)
        page = self._page(incident, query, root="", follow=follow)
        return Reply(status=200, body=page, headers={"Refresh": str(FOLLOW_SECONDS)} if follow else {})

    def chart(self, incident_id: str, name: str, query: Mapping[str, str]) -> Reply:
        """One picture of the page."""
        self.links.verify(incident_id, query, now=self.clock.now())
        incident = self.store.load(incident_id)
        wanted = next((chart for chart in charts_of(incident) if chart.name == name and chart.uri), None)
        if wanted is None:
            return Reply(status=404, body=render_notice("No such chart", "Open the incident's page again."))
        try:
            picture = draw(wanted, self.evidence(wanted.uri))
        except (ClientError, KeyError, TypeError, ValueError):
            picture = draw_unreadable(wanted)
        return Reply(status=200, body=picture, content_type="image/svg+xml")

    def decide(self, incident_id: str, query: Mapping[str, str], body: bytes, *, by: str) -> Reply:
        """Record a decision, and send the browser back to the page, which follows what becomes of it.

        The first decision stands; another answers 409 and changes nothing.
        """
        self.links.verify(incident_id, query, now=self.clock.now())
        try:
            form = form_of(body)
        except ValueError as error:
            incident = self.store.load(incident_id)
            return self._refused(400, incident, query, f"Nothing was decided: the form cannot be read ({error}).")
        deed = self.act(incident_id, form, by=by, by_link=True)
        if deed.status != 200:
            return self._refused(deed.status, deed.incident, query, deed.notice)
        return _back_to_the_page(incident_id, query)

    def act(self, incident_id: str, form: Form, *, by: str, by_link: bool) -> Deed:
        """Record what the form says, and let the waiting state go on. The caller has proved who `by` is."""
        word = form.get("decision", "")
        now = self.clock.now()
        refusals: list[str] = []

        def change(incident: Incident) -> Incident | None:
            policy = self.settings.policy(incident.job.cluster_arn)
            holder = self.store.job_holder(incident.job)
            refused = _refusal(incident, form, by_link=by_link, policy=policy, holder=holder)
            refusals[:] = [refused] if refused else []
            return None if refused else self._changed(incident, form, by=by, now=now)

        if word not in _WORDS:
            incident = self.store.load(incident_id)
            return Deed(status=400, incident=incident, notice="Nothing was decided: press one of the buttons.")
        if missing := reason_missing(approve=word != "reject", comment=form.get("comment", "")):
            # Only the page's own form asks for a reason before it is sent: whatever else posts is asked here.
            incident = self.store.load(incident_id)
            return Deed(status=400, incident=incident, notice=f"Not recorded: {missing}.")
        incident = save_changed(self.store, incident_id, change)
        incident = self._complete(incident, now=now)
        if refusals:
            return Deed(status=409, incident=incident, notice=f"Not recorded: {refusals[0]}.")
        return Deed(status=200, incident=incident)

    def _changed(self, incident: Incident, form: Form, *, by: str, now: datetime) -> Incident:
        word = form["decision"]
        if word == "resume":
            return resumed(incident, form["resume_from"], by=by, now=now)
        if word == "later":
            return postponed(incident, by=by, now=now)
        changed = decided(incident, approve=word == "approve", by=by, comment=form.get("comment", ""), now=now)
        assert changed.approval is not None
        assert changed.approval.decision is not None
        changed = signed(changed, self.signer.sign(digest_of(changed, changed.approval.decision)))
        # Nobody answered in time, and the incident waits in Escalate: the answer leads back to the question.
        waits = incident.status is IncidentStatus.ESCALATED
        return resumed(changed, question_state(changed), by=by, now=now) if waits else changed

    def _complete(self, incident: Incident, *, now: datetime) -> Incident:
        """Let the waiting state go on, in a new execution where the one that waited has ended; returns the incident as
        it is then. Harmless when repeated, and repeated on every post: a first one may have died before this.
        """
        escalation = incident.escalation
        if incident.status is IncidentStatus.ESCALATED and escalation is not None and escalation.resume_from:
            if not go_on(self.store, self.executions, incident):
                return go_on_anew(self.store, self.executions, incident, now=now)
            return incident
        approval = incident.approval
        known = settled(incident, now=self.clock.now())
        if approval is not None and approval.decision is not None and known is not None:
            output = {"incident_id": incident.incident_id, "outcome": str(known[0]), "reason": known[1]}
            self.executions.complete(approval.task_token, output)
        return incident

    def _refused(self, status: int, incident: Incident, query: Mapping[str, str], notice: str) -> Reply:
        return Reply(status=status, body=self._page(incident, query, root="../", notice=notice))

    def _page(
        self, incident: Incident, query: Mapping[str, str], *, root: str, follow: bool = False, notice: str = ""
    ) -> str:
        policy = self.settings.policy(incident.job.cluster_arn)
        now = self.clock.now()
        return render_incident(
            incident,
            policy=policy,
            query=_signed(query),
            root=root,
            now=now,
            quarantined=self.store.quarantined(incident.job.cluster_arn),
            holder=self.store.job_holder(incident.job),
            follow=follow,
            notice=notice,
        )


def _refusal(incident: Incident, form: Form, *, by_link: bool, policy: Policy, holder: str) -> str:
    """Why nothing of the form can be done; empty where it can. holder: id of the incident that holds the job."""
    word = form["decision"]
    if word == "resume":
        return resume_refused(incident, form.get("resume_from", ""), holder=holder)
    if word == "later":
        return postpone_refused(incident)
    shown = form.get("shown", "")
    if word == "approve" and shown and shown != shown_digest(incident):
        return "the suspects, or other jobs' pods on them, are not those that your page showed; read it as it is now"
    return decision_refused(
        incident,
        approve=word == "approve",
        acknowledged=form.get("acknowledge") == "yes",
        by_link=by_link,
        policy=policy,
    )


def _signed(query: Mapping[str, str]) -> dict[str, str]:
    return {name: query.get(name, "") for name in _SIGNED}


def _back_to_the_page(incident_id: str, query: Mapping[str, str]) -> Reply:
    """So that loading the page again shows the incident, and does not send the form again."""
    where = f"../{quote(incident_id, safe='')}?{urlencode({**_signed(query), 'follow': 'yes'})}"
    return Reply(status=303, body=render_notice("Recorded", "Open the incident's page."), headers={"Location": where})
