"""From the alarm's rows to nodes and instances: certain, doubtful or gone."""

from __future__ import annotations

from typing import Any

import pytest

from lambdas.domain.cluster_jobs import PodView
from lambdas.domain.cluster_resolution import (
    InstanceFacts,
    NodeFacts,
    claim_keys,
    claimed,
    facts_of,
    recheck_pod,
    resolve,
    smallest_group,
)
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import SuspectNode
from lambdas.ports import InstanceState
from truestep.contract import IdentityRow, NodeName, Rank, VerdictKind

NODE = "hyperpod-i-0123456789abcdef0"
FOUND = NodeFacts(
    node_present=True,
    instance=InstanceFacts(instance_id="i-1", logical_id="logical-1", instance_group="workers", group_nodes=4),
)
GONE = NodeFacts(node_present=False, instance=None)
NO_INSTANCE = NodeFacts(node_present=True, instance=None)


def row(**changes: Any) -> IdentityRow:
    fields: dict[str, Any] = {"rank": Rank(2), "local_rank": 0, "node_name": NodeName(NODE), "pod_name": "job-0"}
    return IdentityRow(**{**fields, "pod_uid": "uid-1", **changes})


def pod(**changes: Any) -> PodView:
    fields: dict[str, Any] = {"namespace": "team-a", "name": "job-0", "uid": "uid-1", "node_name": NODE}
    return PodView(**{**fields, "phase": "Running", "terminating": False, "job_name": "job", **changes})


def test_the_very_pod_on_the_very_node_leaves_no_doubt() -> None:
    assert recheck_pod(row(), pod(), "job") == ""


@pytest.mark.parametrize(
    ("reported", "found", "word"),
    [
        (row(), None, "gone"),
        (row(), pod(uid="uid-2"), "re-created"),
        (row(), pod(node_name="elsewhere"), "elsewhere"),
        (row(), pod(node_name=""), "no node"),
        (row(pod_uid=""), pod(), "cannot be checked"),
        (row(pod_name=""), None, "cannot be checked"),
        (row(), pod(job_name="warehouse"), "a pod of job warehouse, not of job job"),
        (row(), pod(job_name=""), "a pod of no job, not of job job"),
    ],
)
def test_a_pod_that_moved_or_vanished_or_is_not_the_jobs_is_a_doubt(
    reported: IdentityRow, found: PodView | None, word: str
) -> None:
    assert word in recheck_pod(reported, found, "job")


def resolved(facts: NodeFacts, *doubts: str, kind: VerdictKind = VerdictKind.CONCLUSIVE) -> tuple[Outcome, str]:
    resolution = resolve((SuspectNode(node_name=NODE),), {NODE: facts}, doubts, kind)
    return resolution.outcome, resolution.reason


def test_a_suspect_without_doubt_is_resolved_with_its_instance() -> None:
    resolution = resolve((SuspectNode(node_name=NODE),), {NODE: FOUND}, ["", ""], VerdictKind.CONCLUSIVE)
    assert resolution.outcome is Outcome.RESOLVED
    (suspect,) = resolution.suspects
    assert (suspect.instance_id, suspect.logical_id, suspect.instance_group, suspect.group_nodes) == (
        "i-1",
        "logical-1",
        "workers",
        4,
    )


def test_a_doubt_an_ambiguous_verdict_or_a_missing_instance_asks_a_person() -> None:
    assert resolved(FOUND, "rank 2 moved") == (Outcome.AMBIGUOUS, "rank 2 moved")
    assert resolved(FOUND, kind=VerdictKind.AMBIGUOUS)[0] is Outcome.AMBIGUOUS
    assert resolved(NO_INSTANCE)[0] is Outcome.AMBIGUOUS


def test_a_node_that_left_is_gone_whatever_else_is_in_doubt() -> None:
    assert resolved(GONE, "pod is gone", kind=VerdictKind.AMBIGUOUS)[0] is Outcome.NODE_GONE


def test_an_instance_without_its_kubernetes_node_is_still_there() -> None:
    assert resolved(NodeFacts(node_present=False, instance=FOUND.instance))[0] is Outcome.RESOLVED


def test_an_alarm_that_names_nobody_escalates() -> None:
    assert resolve((), {}, (), VerdictKind.CONCLUSIVE).outcome is Outcome.ESCALATE


def test_what_an_earlier_run_found_survives_the_nodes_departure() -> None:
    earlier = SuspectNode(node_name=NODE, instance_id="i-1", logical_id="logical-1")
    (suspect,) = resolve((earlier,), {NODE: GONE}, (), VerdictKind.CONCLUSIVE).suspects
    assert (suspect.present, suspect.instance_id, suspect.logical_id) == (False, "i-1", "logical-1")


def test_claims_use_the_logical_id_and_skip_what_is_gone() -> None:
    suspects = (
        SuspectNode(node_name="a", logical_id="logical-a"),
        SuspectNode(node_name="b"),
        SuspectNode(node_name="c", present=False),
    )
    assert claim_keys(suspects) == ("logical-a", "b")
    assert [suspect.claim_key for suspect in claimed(suspects)] == ["logical-a", "b", ""]


def instance(number: int, group: str) -> InstanceState:
    return InstanceState(
        instance_id=f"i-{number}",
        logical_id=f"l-{number}",
        instance_group=group,
        status="Running",
        node_name=f"n{number}",
    )


def test_the_breaker_is_measured_by_the_smallest_group_of_a_suspect() -> None:
    suspects = [
        SuspectNode(node_name="a", instance_group="big", group_nodes=40),
        SuspectNode(node_name="b", instance_group="small", group_nodes=3),
        SuspectNode(node_name="c", present=False),
    ]
    assert smallest_group(suspects) == 3
    assert smallest_group(suspects[:1]) == 40
    assert smallest_group(suspects[2:]) == 0


def test_facts_pair_a_node_with_its_instance_and_its_neighbours() -> None:
    facts = facts_of("n2", {}, [instance(1, "g"), instance(2, "g"), instance(3, "h")], [pod(name="other")])
    assert facts.node_present
    assert facts.instance == InstanceFacts(instance_id="i-2", logical_id="l-2", instance_group="g", group_nodes=2)
    assert facts.other_pods == ("team-a/other",)
    assert facts_of("n9", None, [instance(1, "g")], ()) == GONE
