"""The question to a person: when it is asked, repeated, expired, answered."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta

from lambdas.domain.decision import nodes_of, not_covered, question, set_aside
from lambdas.domain.incident import Incident, IncidentStatus, iso, parse_iso
from lambdas.domain.outcome import Outcome
from lambdas.domain.policy import Policy
from lambdas.domain.records import Approval, Decision

COMMENT_LIMIT = 500
REMIND_AFTER = timedelta(hours=4)
"""The question is repeated when nobody has answered for so long."""
ASK_AGAIN_AFTER = timedelta(hours=1)
"""How long a person who is not ready to decide is left alone."""


def asked(incident: Incident, *, task_token: str, now: datetime, policy: Policy) -> Incident:
    """The incident with its question asked, or asked again, and the token that the answer completes.

    Asked again, it keeps its deadline. A person who lets an expired incident go on gets a new one, and so does whoever
    is asked anew because the suspects are not those that were approved.
    """
    if gap := not_covered(incident, policy):
        incident = set_aside(incident, f"{gap}; it is asked for anew", now=now, policy=policy)
    earlier = incident.approval
    if earlier is None:
        approval = question(now, policy, task_token=task_token)
    elif earlier.decision is None and (_never_asked(earlier) or _expired_and_resumed(incident, earlier)):
        approval = question(now, policy, task_token=task_token, set_aside=earlier.set_aside)
    else:
        approval = dataclasses.replace(earlier, task_token=task_token)
    return incident.evolve(approval=approval)


def announcement_due(incident: Incident, *, now: datetime) -> bool:
    """Whether people are to be told now: for the first time, as a reminder, or after a stop that a person has ended.

    The state is entered every few minutes, so that a message which never got out is not missed for long.
    """
    approval = incident.approval
    if approval is None or not approval.announced_at:
        return True
    told = parse_iso(approval.announced_at)
    stop = incident.escalation
    if stop is not None and parse_iso(stop.at) >= told:
        return True
    return now >= (parse_iso(approval.ask_again_at) if approval.ask_again_at else told + REMIND_AFTER)


def announced(incident: Incident, *, now: datetime) -> Incident | None:
    """The incident with the note that the message is out; None where no question is on record."""
    approval = incident.approval
    if approval is None:
        return None
    told = dataclasses.replace(
        approval, announced_at=iso(now), announcements=approval.announcements + 1, ask_again_at=""
    )
    return incident.evolve(approval=told)


def _never_asked(approval: Approval) -> bool:
    """The question came up anew where a decision was set aside, and waited for a person to ask it."""
    return bool(approval.set_aside) and not approval.announced_at


def _expired_and_resumed(incident: Incident, approval: Approval) -> bool:
    escalation = incident.escalation
    return escalation is not None and parse_iso(escalation.at) >= parse_iso(approval.expires_at)


def settled(incident: Incident, *, now: datetime) -> tuple[Outcome, str] | None:
    """The outcome of RequestApproval if there is one already, and why; None while the question is open."""
    if incident.dry_run:
        return Outcome.REJECTED, "dry run: the question was announced, and nothing is replaced"
    approval = incident.approval
    if approval is None:
        return None
    if approval.decision is not None:
        word = Outcome.APPROVED if approval.decision.approved else Outcome.REJECTED
        comment = f": {approval.decision.comment}" if approval.decision.comment else ""
        return word, f"{word} {approval.decision.decided_by} at {approval.decision.at}{comment}"
    if now >= parse_iso(approval.expires_at):
        return Outcome.EXPIRED, f"nobody decided before {approval.expires_at}; the nodes stay quarantined"
    return None


def decision_refused(incident: Incident, *, approve: bool, acknowledged: bool, by_link: bool, policy: Policy) -> str:
    """Why this decision cannot be recorded; empty where it can."""
    approval = incident.approval
    if approval is None:
        return "no decision is asked for in this incident now"
    if approval.decision is not None:
        word = "approved" if approval.decision.approved else "rejected"
        return f"this incident was already {word} at {approval.decision.at}; the first decision stands"
    if not asking(incident):
        going = incident.escalation.resume_from if incident.escalation else ""
        escalated = incident.status is IncidentStatus.ESCALATED
        now = f"is going on from {going}" if escalated and going else f"is {incident.status}"
        return f"the incident {now}, past its question: nothing would act on a decision"
    if incident.dry_run:
        return "this is a dry run: nothing would be replaced, so there is nothing to decide"
    if approve and by_link and not policy.replacement_by_link:
        return "this deployment does not let a link approve a replacement; use truestep incidents approve"
    if approve and not acknowledged and policy.acknowledge_other_pods and other_pods(incident):
        return "other jobs' pods run on the node and would be lost: tick the acknowledgement to approve"
    return ""


def reason_missing(*, approve: bool, comment: str) -> str:
    """What a rejection without a reason lacks; empty where nothing is. An approval needs none.

    A rejected incident counts for nothing in its GPU's history: whoever reads that must find why.
    """
    if approve or comment.strip():
        return ""
    return "a rejection needs a reason for the record; say why the nodes are given back"


def postpone_refused(incident: Incident) -> str:
    """Why nobody can be asked again later; empty where somebody can."""
    approval = incident.approval
    if approval is None or approval.decision is not None or incident.dry_run:
        return "no decision is asked for in this incident now"
    if incident.status is not IncidentStatus.AWAITING_APPROVAL:
        return f"the incident is {incident.status}, and reminds nobody of its question"
    return ""


def postponed(incident: Incident, *, by: str, now: datetime) -> Incident:
    """The incident whose next reminder comes in `ASK_AGAIN_AFTER`. Check `postpone_refused` first.

    The question stays open, and its deadline is the same. Raises ValueError where none is asked.
    """
    if incident.approval is None:
        raise ValueError("no decision is open")
    at = iso(now + ASK_AGAIN_AFTER)
    return incident.evolve(approval=dataclasses.replace(incident.approval, ask_again_at=at)).noted(
        at=now, state="Decision", outcome="later", reason=f"to be asked again after {at}, {by}"
    )


def asking(incident: Incident) -> bool:
    """Whether the execution would act on a decision: it waits for one, or in an escalation that nobody has ended."""
    if incident.status is IncidentStatus.ESCALATED:
        return incident.escalation is not None and not incident.escalation.resume_from
    return incident.status is IncidentStatus.AWAITING_APPROVAL


def other_pods(incident: Incident) -> tuple[str, ...]:
    """``namespace/name`` of other jobs' pods on the suspects' nodes."""
    return tuple(pod for suspect in incident.suspects for pod in suspect.other_pods)


def decided(incident: Incident, *, approve: bool, by: str, comment: str, now: datetime) -> Incident:
    """The incident with the decision recorded. Check `decision_refused` first: a decision is never overwritten.

    Raises ValueError where one is there already or none was asked for.
    """
    if incident.approval is None or incident.approval.decision is not None:
        raise ValueError("no decision is open")
    decision = Decision(
        approved=approve,
        at=iso(now),
        decided_by=by,
        comment=comment.strip()[:COMMENT_LIMIT],
        nodes=nodes_of(incident),
    )
    return incident.evolve(approval=dataclasses.replace(incident.approval, decision=decision)).noted(
        at=now,
        state="Decision",
        outcome="approved" if approve else "rejected",
        reason=f"{by}: {decision.comment}" if decision.comment else by,
    )
