"""What a person's decision covers, and what of it is signed: no other function can make one. Pure.

Nearly every function may write to the table, and several can complete a waiting state. So the one act that destroys
something does not rest on the record alone: the decision carries a MAC, made by decide_approval's key.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Final

from lambdas.domain.incident import Incident, iso
from lambdas.domain.policy import Policy
from lambdas.domain.records import Approval, DecidedNode, Decision, SuspectNode
from truestep.contract import sha256_hex, to_json

DECIDE_AGAIN: Final = (
    "Look at the incident's page as it is now (move other jobs' pods that must live) and decide again, or resume at "
    "RequestApproval"
)
_SET_ASIDE_LIMIT: Final = 20
_SHOWN: Final = 60
"""Characters of a name in a sentence: whoever forges a record chooses them."""


def digest_of(incident: Incident, decision: Decision) -> str:
    """SHA-256, in hex, of everything that a decision means; its MAC is over these digits.

    That is the incident and its cluster, the answer, who, when, the comment, and the nodes that it was about.
    """
    return sha256_hex(
        {
            "what": "truestep decision 1",
            "incident_id": incident.incident_id,
            "cluster_arn": incident.job.cluster_arn,
            "decision": dataclasses.replace(decision, mac=""),
        }
    )


def signed(incident: Incident, mac: str) -> Incident:
    """The incident whose decision carries this MAC. Raises ValueError where there is no decision."""
    approval = incident.approval
    if approval is None or approval.decision is None:
        raise ValueError("there is no decision to sign")
    decision = dataclasses.replace(approval.decision, mac=mac)
    return incident.evolve(approval=dataclasses.replace(approval, decision=decision))


def nodes_of(incident: Incident) -> tuple[DecidedNode, ...]:
    """The suspects as a decision is about them now."""
    return tuple(
        DecidedNode(node_name=suspect.node_name, instance_id=_instance(suspect), other_pods=suspect.other_pods)
        for suspect in incident.suspects
    )


def shown_digest(incident: Incident) -> str:
    """SHA-256, in hex, of what an approval would be about now: the page sends it along with the button."""
    return sha256_hex([to_json(node) for node in nodes_of(incident)])


def not_covered(incident: Incident, policy: Policy) -> str:
    """What would be replaced now that the approval on record was not about; empty where there is none, or no approval.

    The suspects change where an incident goes on from ResolveNode, and other jobs' pods come and go.
    """
    decision = incident.approval.decision if incident.approval else None
    if decision is None or not decision.approved:
        return ""
    covered = {(node.node_name, node.instance_id): node.other_pods for node in decision.nodes}
    gaps = []
    for suspect in incident.suspects:
        accepted = covered.get((suspect.node_name, _instance(suspect)))
        if accepted is None:
            gaps.append(f"{suspect.node_name} ({_instance(suspect) or 'no instance'})")
        elif policy.acknowledge_other_pods and suspect.present and suspect.replacement is None:
            gaps += [f"pod {pod} on {suspect.node_name}" for pod in suspect.other_pods if pod not in accepted]
    if not gaps:
        return ""
    more = f" and {len(gaps) - 4} more" if len(gaps) > 4 else ""
    return f"{_named(decision)} did not cover {', '.join(gaps[:4])}{more}"


def forged(incident: Incident) -> str:
    """The sentence about a decision whose MAC is missing or wrong. Raises ValueError where there is no decision."""
    decision = incident.approval.decision if incident.approval else None
    if decision is None:
        raise ValueError("there is no decision")
    return (
        f"{_named(decision)} was not made by the approval function: nothing was done on its word. Find out who wrote "
        "to the table (runbook, RecoveryEscalated), then decide on the incident's page, or resume at RequestApproval"
    )


def set_aside(incident: Incident, why: str, *, now: datetime, policy: Policy) -> Incident:
    """The incident with its decision kept among those that do not count, and the question open again.

    Raises ValueError where there is no decision.
    """
    approval = incident.approval
    if approval is None or approval.decision is None:
        raise ValueError("there is no decision to set aside")
    kept = (*approval.set_aside, approval.decision)[-_SET_ASIDE_LIMIT:]
    asked_anew = question(now, policy, task_token=approval.task_token, set_aside=kept)
    return incident.evolve(approval=asked_anew).noted(at=now, state="Decision", outcome="set_aside", reason=why)


def question(now: datetime, policy: Policy, *, task_token: str, set_aside: tuple[Decision, ...] = ()) -> Approval:
    """A question that is asked now."""
    return Approval(
        requested_at=iso(now),
        expires_at=iso(now + timedelta(hours=policy.approval_expires_after_hours)),
        task_token=task_token,
        set_aside=set_aside,
    )


def _instance(suspect: SuspectNode) -> str:
    """The instance that a replacement destroys: the one that was intended, once one was."""
    return suspect.replacement.old_instance_id if suspect.replacement else suspect.instance_id


def _named(decision: Decision) -> str:
    word = "approval" if decision.approved else "rejection"
    return f"the {word} on record ({decision.decided_by[:_SHOWN]}, {decision.at[:_SHOWN]})"
