"""CordonNode and ReleaseNode on a real API server's behaviour: guarded writes, nobody else's marks lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lambdas.adapters.kubernetes import Kubernetes, KubernetesError
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import World

HYPERPOD_TAINT = {"key": "sagemaker.amazonaws.com/node-health-status", "value": "Unschedulable", "effect": "NoSchedule"}


def quarantine_of(node: dict[str, Any]) -> tuple[bool, list[str], bool]:
    """(unschedulable, values of our taint, annotated)."""
    taints = [t["value"] for t in node["spec"].get("taints") or [] if t["key"] == "truestep.ai/quarantine"]
    return (
        bool(node["spec"].get("unschedulable")),
        taints,
        "truestep.ai/quarantine" in (node["metadata"].get("annotations") or {}),
    )


def test_a_suspect_is_cordoned_once_however_often_the_state_is_entered(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    name = incident.suspects[0].node_name
    assert recovery.run("cordon_node", incident.incident_id)["outcome"] == "cordoned"
    after = world.node(name)
    assert quarantine_of(after) == (True, [incident.incident_id], True)
    assert recovery.run("cordon_node", incident.incident_id)["outcome"] == "cordoned"
    assert world.node(name)["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
    cordon = recovery.load(incident.incident_id).suspects[0].cordon
    assert cordon is not None
    assert cordon.ours


def test_a_release_leaves_what_hyperpod_put_on_the_node(recovery: Recovery, world: World) -> None:
    incident = recovery.open(approved=False)
    name = incident.suspects[0].node_name
    recovery.run("resolve_node", incident.incident_id)
    recovery.run("cordon_node", incident.incident_id)
    world.edit_node(name, {"spec": {"taints": [*world.node(name)["spec"]["taints"], HYPERPOD_TAINT]}})
    assert recovery.run("release_node", incident.incident_id)["outcome"] == "released"
    node = world.node(name)
    assert quarantine_of(node) == (False, [], False)
    assert node["spec"]["taints"] == [HYPERPOD_TAINT]
    assert recovery.store.quarantined(incident.job.cluster_arn) == frozenset()
    assert recovery.run("release_node", incident.incident_id)["outcome"] == "released"
    world.edit_node(name, {"spec": {"taints": []}})


def test_a_node_cordoned_by_someone_else_stays_cordoned_after_the_release(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    name = incident.suspects[0].node_name
    world.edit_node(name, {"spec": {"unschedulable": True}})
    answer = recovery.run("cordon_node", incident.incident_id)
    assert answer["outcome"] == "left_theirs"
    assert quarantine_of(world.node(name)) == (True, [incident.incident_id], True)
    assert recovery.run("release_node", incident.incident_id)["outcome"] == "escalate", "nobody has rejected"
    recovery.decide(incident.incident_id, approve=False)
    recovery.run("release_node", incident.incident_id)
    assert quarantine_of(world.node(name)) == (True, [], False)


def test_a_cordon_that_somebody_set_after_opening_the_node_stays_after_the_release(
    recovery: Recovery, world: World
) -> None:
    """A person takes ours off, and cordons the node later for work of their own; then the accusation is rejected."""
    incident = recovery.open(approved=False)
    name = incident.suspects[0].node_name
    recovery.run("resolve_node", incident.incident_id)
    recovery.run("cordon_node", incident.incident_id)
    for cordoned in (None, True):
        world.edit_node(name, {"spec": {"unschedulable": cordoned}})
    answer = recovery.run("release_node", incident.incident_id)
    assert answer["outcome"] == "released"
    assert "the cordon is left: it is somebody else's, set by" in answer["reason"]
    assert quarantine_of(world.node(name)) == (True, [], False)


def test_a_release_of_what_is_not_ours_is_left_alone(recovery: Recovery, world: World) -> None:
    incident = recovery.open(approved=False)
    before = world.node(incident.suspects[0].node_name)
    assert recovery.run("release_node", incident.incident_id)["outcome"] == "left_alone"
    assert (
        world.node(before["metadata"]["name"])["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    )


def test_a_dry_run_writes_nothing_to_the_node(recovery: Recovery, world: World) -> None:
    incident = recovery.open(dry_run=True)
    name = incident.suspects[0].node_name
    before = world.node(name)
    answer = recovery.run("cordon_node", incident.incident_id)
    assert answer["outcome"] == "cordoned"
    assert "dry run" in answer["reason"]
    assert world.node(name)["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert recovery.load(incident.incident_id).suspects[0].cordon is None


def test_a_write_that_lost_a_race_is_planned_again_on_the_new_state(kubernetes: Kubernetes, world: World) -> None:
    name = world.nodes()[0]["node_name"]
    stale = kubernetes.node(name)
    assert stale is not None
    world.edit_node(name, {"metadata": {"labels": {"race": "lost"}}})
    seen: list[str] = []

    def node_with_a_race(wanted: str) -> dict[str, Any] | None:
        """The first read is older than the write that follows it."""
        seen.append(wanted)
        return stale if len(seen) == 1 else fresh(wanted)

    fresh = kubernetes.node
    kubernetes.node = node_with_a_race  # type: ignore[method-assign,assignment]
    assert kubernetes.cordon(name, "inc-race", "2026-01-01T00:00:00.000Z") is not None
    assert len(seen) == 2
    after = world.node(name)
    assert quarantine_of(after) == (True, ["inc-race"], True)
    assert after["metadata"]["labels"]["race"] == "lost"
    kubernetes.release(name, "inc-race")
    assert quarantine_of(world.node(name)) == (False, [], False)


def test_a_write_that_the_server_never_accepts_is_an_error_not_an_endless_race(
    kubernetes: Kubernetes, world: World
) -> None:
    name = world.nodes()[0]["node_name"]
    before = world.node(name)["metadata"]["resourceVersion"]
    with pytest.raises(KubernetesError, match="422"):
        kubernetes.cordon(name, "not a label value!", "2026-01-01T00:00:00.000Z")
    assert world.node(name)["metadata"]["resourceVersion"] == before


def test_incidents_cordoning_one_node_at_once_leave_one_quarantine(kubernetes: Kubernetes, world: World) -> None:
    name = world.nodes()[0]["node_name"]
    threads = [
        threading.Thread(target=lambda incident=incident: kubernetes.cordon(name, incident, "2026-01-01T00:00:00.000Z"))
        for incident in ("inc-a", "inc-b", "inc-c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unschedulable, holders, annotated = quarantine_of(world.node(name))
    assert (unschedulable, len(holders), annotated) == (True, 1, True)
    kubernetes.release(name, holders[0])
    assert quarantine_of(world.node(name)) == (False, [], False)


def test_a_node_that_is_not_there_is_gone(kubernetes: Kubernetes) -> None:
    assert kubernetes.node("hyperpod-i-00000000000000000") is None
    assert kubernetes.cordon("hyperpod-i-00000000000000000", "inc-1", "t") is None
    assert kubernetes.release("hyperpod-i-00000000000000000", "inc-1") is None
