"""What a decision covers, word for word, and what becomes of one that does not count."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from lambdas.domain.approval import announced, asked, decided, settled
from lambdas.domain.cluster_resolution import claimed
from lambdas.domain.decision import digest_of, forged, nodes_of, not_covered, set_aside, signed
from lambdas.domain.incident import Incident, IncidentStatus, iso, open_incident
from lambdas.domain.outcome import Outcome
from lambdas.domain.policy import Policy
from lambdas.domain.records import DecidedNode, Decision, Replacement
from lambdas.domain.workflow import escalated, resume_refused
from tests.unit.recovery.alarms import NOW, an_alarm

POLICY = Policy()
LATER = NOW + timedelta(hours=1)


def resolved(**changes: Any) -> Incident:
    """An incident whose suspect has an instance, and another job's pod."""
    incident = open_incident(an_alarm(), now=NOW, dry_run=False)
    fields = {"instance_id": "i-1", "other_pods": ("team-b/neighbour",), **changes}
    suspects = tuple(replace(suspect, **fields) for suspect in incident.suspects)
    return incident.evolve(suspects=suspects, status=IncidentStatus.AWAITING_APPROVAL)


def approved(incident: Incident) -> Incident:
    question = asked(incident, task_token="t", now=NOW, policy=POLICY)
    told = announced(question, now=NOW)
    assert told is not None
    return decided(told, approve=True, by="by link", comment="", now=NOW)


def decision_of(incident: Incident) -> Decision:
    assert incident.approval is not None
    assert incident.approval.decision is not None
    return incident.approval.decision


def test_every_word_of_a_decision_and_the_incident_it_is_of_change_its_digest() -> None:
    incident = approved(resolved())
    decision = decision_of(incident)
    node = decision.nodes[0]
    changes: list[dict[str, Any]] = [
        {"approved": False},
        {"at": iso(LATER)},
        {"decided_by": "by link, from 192.0.2.7"},
        {"comment": "x"},
        {"nodes": ()},
        {"nodes": (*decision.nodes, DecidedNode(node_name="n", instance_id="i-9"))},
        {"nodes": (replace(node, node_name="n"), *decision.nodes[1:])},
        {"nodes": (replace(node, instance_id="i-2"), *decision.nodes[1:])},
        {"nodes": (replace(node, other_pods=()), *decision.nodes[1:])},
    ]
    others = [digest_of(incident, replace(decision, **change)) for change in changes]
    others.append(digest_of(incident.evolve(incident_id="inc-" + "0" * 16), decision))
    others.append(digest_of(incident.evolve(job=replace(incident.job, cluster_arn="arn:other")), decision))
    assert len({digest_of(incident, decision), *others}) == len(others) + 1
    assert digest_of(incident, replace(decision, mac="m")) == digest_of(incident, decision), "a MAC is not of itself"
    assert decision_of(signed(incident, "m")).mac == "m"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"instance_id": "i-2"}, "(i-2)"),
        ({"instance_id": ""}, "(no instance)"),
        ({"node_name": "elsewhere"}, "elsewhere (i-1)"),
        ({"replacement": Replacement(old_instance_id="i-victim", intended_at=iso(NOW))}, "(i-victim)"),
        ({"other_pods": ("team-b/neighbour", "team-c/new")}, "pod team-c/new on"),
    ],
)
def test_what_has_come_since_the_approval_is_not_covered(changes: dict[str, Any], named: str) -> None:
    incident = approved(resolved())
    assert not_covered(incident, POLICY) == ""
    changed = incident.evolve(suspects=tuple(replace(suspect, **changes) for suspect in incident.suspects))
    assert named in not_covered(changed, POLICY)


def test_what_an_approval_covers_stays_covered() -> None:
    intent = Replacement(old_instance_id="i-1", intended_at=iso(NOW))
    incident = approved(resolved())
    for changes in ({"replacement": intent, "instance_id": "i-new"}, {"other_pods": ()}, {"present": False}):
        changed = incident.evolve(suspects=tuple(replace(suspect, **changes) for suspect in incident.suspects))
        assert not_covered(changed, POLICY) == "", changes
    more = incident.evolve(suspects=tuple(replace(one, other_pods=("a/b",)) for one in incident.suspects))
    assert not_covered(more, Policy(acknowledge_other_pods=False)) == ""
    assert not_covered(resolved(), POLICY) == "", "nobody has decided"


def test_a_decision_that_is_set_aside_is_kept_and_the_question_is_open_with_a_deadline_of_its_own() -> None:
    incident = signed(approved(resolved()), "m")
    aside = set_aside(incident, "the reason", now=LATER, policy=POLICY)
    assert aside.approval is not None
    assert aside.approval.set_aside == (decision_of(incident),)
    assert (aside.timeline[-1].outcome, aside.timeline[-1].reason) == ("set_aside", "the reason")
    assert not aside.approved
    aside = aside.evolve(suspects=claimed(aside.suspects))
    stopped = escalated(aside, failed_state="ReplaceNode", error="", cause="", task_token="e", now=LATER)
    stopped = stopped.evolve(status=IncidentStatus.ESCALATED)
    assert resume_refused(stopped, "ReplaceNode", holder=stopped.incident_id)
    assert resume_refused(stopped, "RequestApproval", holder=stopped.incident_id) == ""
    days = LATER + timedelta(hours=2 * POLICY.approval_expires_after_hours)
    anew = asked(stopped, task_token="t2", now=days, policy=POLICY)
    assert settled(anew, now=days) is None, "nobody was told of this question before"
    assert anew.approval is not None
    assert anew.approval.set_aside == aside.approval.set_aside


def test_a_question_is_asked_anew_only_where_the_approval_does_not_cover_the_suspects() -> None:
    incident = approved(resolved())
    same = asked(incident, task_token="t2", now=LATER, policy=POLICY)
    assert same.approved
    moved = incident.evolve(suspects=tuple(replace(one, instance_id="i-2") for one in incident.suspects))
    anew = asked(moved, task_token="t2", now=LATER, policy=POLICY)
    assert anew.approval is not None
    assert (anew.approval.decision, anew.approval.task_token) == (None, "t2")
    assert "(i-2); it is asked for anew" in anew.timeline[-1].reason
    again = decided(anew, approve=True, by="by link", comment="", now=LATER)
    assert decision_of(again).nodes == nodes_of(moved)
    known = settled(again, now=LATER)
    assert known is not None
    assert known[0] is Outcome.APPROVED


def test_the_sentence_about_a_forged_decision_fits_the_timeline_whatever_it_holds() -> None:
    incident = approved(resolved())
    assert incident.approval is not None
    decision = replace(decision_of(incident), decided_by="x" * 5000, at="y" * 5000)
    sentence = forged(incident.evolve(approval=replace(incident.approval, decision=decision)))
    assert len(sentence) <= 400
    assert "RequestApproval" in sentence
