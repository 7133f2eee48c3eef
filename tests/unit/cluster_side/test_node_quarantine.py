"""Quarantine of a node: what is written, and that nothing of anybody else is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdas.domain.cluster_nodes import (
    FIELD_MANAGER,
    QUARANTINE_KEY,
    CordonAction,
    is_schedulable,
    opened_since,
    plan_cordon,
    plan_release,
    read_mark,
)
from local_stack.cluster.kubernetes.managed_fields import managed_fields
from local_stack.cluster.kubernetes.patch import apply_json_patch

AT = "2026-01-02T03:04:05.000Z"
HYPERPOD_TAINT = {"key": "sagemaker.amazonaws.com/node-health-status", "value": "Unschedulable", "effect": "NoSchedule"}

taints = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(["a/b", "sagemaker.amazonaws.com/node-health-status", "nvidia.com/gpu"]),
            "value": st.sampled_from(["", "x"]),
            "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
        }
    ),
    max_size=4,
)


def node(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "metadata": {"name": "hyperpod-i-1", "resourceVersion": "7"}, "spec": spec}


def patched(document: dict[str, Any], patch: Any) -> dict[str, Any]:
    """After the recovery's write."""
    return written(document, apply_json_patch(document, [dict(operation) for operation in patch]), FIELD_MANAGER)


def written(before: dict[str, Any], after: dict[str, Any], by: str) -> dict[str, Any]:
    """The document with the note that the API server makes of the write."""
    noted = managed_fields(before, after, manager=by, at="2026-01-02T03:04:05Z")
    return {**after, "metadata": {**after["metadata"], "managedFields": noted}}


def cordoned_by(document: dict[str, Any], by: str, *, cordoned: bool = True) -> dict[str, Any]:
    spec = {name: value for name, value in document["spec"].items() if name != "unschedulable"}
    return written(document, {**document, "spec": {**spec, **({"unschedulable": True} if cordoned else {})}}, by)


def test_a_cordon_is_one_patch_guarded_by_the_resource_version() -> None:
    plan = plan_cordon(node(), "inc-1", AT)
    assert plan.action is CordonAction.CORDON
    assert plan.patch[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    after = patched(node(), plan.patch)
    assert after["spec"]["unschedulable"] is True
    assert after["spec"]["taints"] == [{"key": QUARANTINE_KEY, "value": "inc-1", "effect": "NoSchedule"}]
    mark = read_mark(after)
    assert mark is not None
    assert (mark.incident_id, mark.previous_unschedulable, mark.at) == ("inc-1", False, AT)


@given(taints=taints, annotations=st.none() | st.just({"other": "kept"}), unschedulable=st.sampled_from([None, True]))
def test_release_undoes_exactly_what_cordon_did(
    taints: list[dict[str, str]], annotations: dict[str, str] | None, unschedulable: bool | None
) -> None:
    before = node()
    if taints:
        before["spec"]["taints"] = taints
    if unschedulable:
        before["spec"]["unschedulable"] = True
    if annotations:
        before["metadata"]["annotations"] = annotations
    cordoned = patched(before, plan_cordon(before, "inc-1", AT).patch)
    assert [taint for taint in cordoned["spec"]["taints"] if taint["key"] != QUARANTINE_KEY] == taints
    assert cordoned["spec"]["unschedulable"] is True
    released = patched(cordoned, plan_release(cordoned, "inc-1").patch)
    assert (released["spec"].get("taints") or []) == taints
    assert released["spec"].get("unschedulable") == unschedulable
    assert (released["metadata"].get("annotations") or None) == annotations


def test_cordoning_twice_writes_once() -> None:
    once = patched(node(), plan_cordon(node(), "inc-1", AT).patch)
    again = plan_cordon(once, "inc-1", "2026-01-02T09:00:00.000Z")
    assert again.action is CordonAction.NOTHING
    assert again.patch == ()


def test_a_node_cordoned_by_someone_else_keeps_their_cordon_and_is_not_uncordoned_later() -> None:
    theirs = node(unschedulable=True, taints=[HYPERPOD_TAINT])
    plan = plan_cordon(theirs, "inc-1", AT)
    assert plan.action is CordonAction.MARK_ONLY
    assert plan.theirs
    marked = patched(theirs, plan.patch)
    released = patched(marked, plan_release(marked, "inc-1").patch)
    assert released["spec"] == {"unschedulable": True, "taints": [HYPERPOD_TAINT]}


def test_our_taint_holds_when_the_owner_of_the_other_cordon_takes_it_off() -> None:
    marked = patched(node(unschedulable=True), plan_cordon(node(unschedulable=True), "inc-1", AT).patch)
    del marked["spec"]["unschedulable"]
    assert plan_cordon(marked, "inc-1", AT).patch == ()
    assert [taint["value"] for taint in marked["spec"]["taints"]] == ["inc-1"]


def test_a_node_that_someone_uncordoned_is_cordoned_again_with_the_first_mark() -> None:
    once = patched(node(), plan_cordon(node(), "inc-1", AT).patch)
    del once["spec"]["unschedulable"]
    once["spec"]["taints"] = [HYPERPOD_TAINT]
    again = patched(once, plan_cordon(once, "inc-1", "2027-01-01T00:00:00.000Z").patch)
    assert again["spec"]["unschedulable"] is True
    assert [taint["key"] for taint in again["spec"]["taints"]] == [HYPERPOD_TAINT["key"], QUARANTINE_KEY]
    mark = read_mark(again)
    assert mark is not None
    assert mark.at == AT


def test_another_incidents_quarantine_is_neither_taken_over_nor_released() -> None:
    held = patched(node(), plan_cordon(node(), "inc-1", AT).patch)
    plan = plan_cordon(held, "inc-2", AT)
    assert plan.action is CordonAction.LEAVE
    assert plan.patch == ()
    assert "inc-1" in plan.reason
    release = plan_release(held, "inc-2")
    assert not release.released
    assert release.patch == ()


def test_a_cordon_that_somebody_set_after_opening_the_node_is_left_and_told() -> None:
    ours = patched(node(), plan_cordon(node(), "inc-1", AT).patch)
    assert opened_since(ours, "inc-1") == ""
    theirs = cordoned_by(cordoned_by(ours, "kubectl", cordoned=False), "kubectl-cordon")
    assert "cordoned anew: it is somebody else's, set by kubectl-cordon" in opened_since(theirs, "inc-1")
    plan = plan_release(theirs, "inc-1")
    assert plan.reason.endswith("the cordon is left: it is somebody else's, set by kubectl-cordon")
    released = patched(theirs, plan.patch)
    assert released["spec"] == {"unschedulable": True, "taints": []}
    assert read_mark(released) is None


def test_a_cordon_that_both_set_is_left_and_so_is_one_that_nobody_knows_of() -> None:
    ours = patched(node(), plan_cordon(node(), "inc-1", AT).patch)
    (entry,) = ours["metadata"]["managedFields"]
    shared = {**ours, "metadata": {**ours["metadata"], "managedFields": [entry, {**entry, "manager": "gitops"}]}}
    assert plan_release(shared, "inc-1").reason.endswith("it is somebody else's, set by gitops")
    unknown = {**ours, "metadata": {**ours["metadata"], "managedFields": []}}
    assert "kubectl uncordon hyperpod-i-1" in plan_release(unknown, "inc-1").reason
    for document in (shared, unknown):
        assert patched(document, plan_release(document, "inc-1").patch)["spec"]["unschedulable"] is True
        assert opened_since(document, "inc-1") == ""


def test_releasing_twice_writes_once() -> None:
    cordoned = patched(node(), plan_cordon(node(), "inc-1", AT).patch)
    released = patched(cordoned, plan_release(cordoned, "inc-1").patch)
    assert plan_release(released, "inc-1").patch == ()


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"incident_id": "inc-1"}'])
def test_an_annotation_that_does_not_parse_belongs_to_nobody(text: str) -> None:
    document = node()
    document["metadata"]["annotations"] = {QUARANTINE_KEY: text}
    assert read_mark(document) is None
    assert not plan_release(document, "inc-1").released


@pytest.mark.parametrize(
    ("ready", "spec", "schedulable"),
    [
        ("True", {}, True),
        ("True", {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, True),
        ("True", {"taints": [{"key": "x", "effect": "PreferNoSchedule"}]}, True),
        ("False", {}, False),
        ("True", {"unschedulable": True}, False),
        ("True", {"taints": [HYPERPOD_TAINT]}, False),
    ],
)
def test_schedulable_means_ready_and_free_of_blocking_taints(ready: str, spec: Any, schedulable: bool) -> None:
    document = {**node(**spec), "status": {"conditions": [{"type": "Ready", "status": ready}]}}
    assert is_schedulable(document)[0] is schedulable


def test_a_node_without_a_ready_condition_is_not_schedulable() -> None:
    assert is_schedulable(node()) == (False, "hyperpod-i-1 is not Ready (condition is missing)")
