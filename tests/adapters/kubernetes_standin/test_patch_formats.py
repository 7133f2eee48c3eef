from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.patch import (
    apply_json_patch,
    apply_merge_patch,
    apply_strategic_merge_patch,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
# A loaded machine may take seconds for the first example.
RELAXED = settings(suppress_health_check=[HealthCheck.too_slow])
OBJECT = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


@pytest.mark.parametrize(
    ("document", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_gives_the_results_of_rfc_7386_appendix_a(document: Any, patch: Any, result: Any) -> None:
    assert apply_merge_patch(document, patch) == result


@RELAXED
@given(OBJECT, OBJECT)
def test_a_merge_patch_applied_twice_is_applied_once(document: Any, patch: Any) -> None:
    once = apply_merge_patch(document, patch)
    assert apply_merge_patch(once, patch) == once


@RELAXED
@given(OBJECT, st.sampled_from("abc"), JSON)
def test_json_patch_add_then_remove_of_a_new_member_restores(document: Any, key: str, value: Any) -> None:
    document.pop(key, None)
    add = [{"op": "add", "path": f"/{key}", "value": value}]
    remove = [{"op": "test", "path": f"/{key}", "value": value}, {"op": "remove", "path": f"/{key}"}]
    assert apply_json_patch(apply_json_patch(document, add), remove) == document


@pytest.mark.parametrize(
    ("operations", "result"),
    [
        ([{"op": "add", "path": "/list/1", "value": 9}], {"list": [1, 9, 2], "a/b": {"~": 0}}),
        ([{"op": "add", "path": "/list/-", "value": 9}], {"list": [1, 2, 9], "a/b": {"~": 0}}),
        ([{"op": "replace", "path": "/a~1b/~0", "value": 1}], {"list": [1, 2], "a/b": {"~": 1}}),
        ([{"op": "move", "from": "/list/0", "path": "/first"}], {"list": [2], "a/b": {"~": 0}, "first": 1}),
        ([{"op": "copy", "from": "/list", "path": "/a~1b"}], {"list": [1, 2], "a/b": [1, 2]}),
    ],
)
def test_json_patch_follows_rfc_6902(operations: list[dict[str, Any]], result: Any) -> None:
    document = {"list": [1, 2], "a/b": {"~": 0}}
    assert apply_json_patch(document, operations) == result
    assert document == {"list": [1, 2], "a/b": {"~": 0}}, "the document itself was changed"


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ({"op": "replace", "path": "/absent", "value": 1}, 422),
        ({"op": "remove", "path": "/list/2"}, 422),
        ({"op": "add", "path": "/list/3", "value": 1}, 422),
        ({"op": "add", "path": "/absent/deeper", "value": 1}, 422),
        ({"op": "test", "path": "/list/0", "value": 2}, 422),
        ({"op": "merge", "path": "/list"}, 400),
        ({"op": "add", "path": "list", "value": 1}, 400),
    ],
)
def test_a_json_patch_that_does_not_apply_is_refused(operation: dict[str, Any], code: int) -> None:
    with pytest.raises(ApiError) as refused:
        apply_json_patch({"list": [1, 2]}, [operation])
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("patch", "result"),
    [
        ({"conditions": [{"type": "B", "s": 2}]}, {"conditions": [{"type": "A", "s": 1}, {"type": "B", "s": 2}]}),
        ({"conditions": [{"type": "A", "s": 3}]}, {"conditions": [{"type": "A", "s": 3}]}),
        ({"conditions": [{"type": "A", "$patch": "delete"}]}, {"conditions": []}),
        (
            {"conditions": [{"$patch": "replace"}, {"type": "C"}], "$setElementOrder/conditions": [{"type": "C"}]},
            {"conditions": [{"type": "C"}]},
        ),
    ],
)
def test_a_strategic_patch_merges_keyed_lists(patch: Any, result: Any) -> None:
    assert apply_strategic_merge_patch({"conditions": [{"type": "A", "s": 1}]}, patch) == result


def test_a_strategic_patch_extends_finalizers_and_replaces_taints() -> None:
    document = {"finalizers": ["a"], "taints": [{"key": "a"}]}
    patch = {"finalizers": ["b"], "taints": [{"key": "b"}]}
    assert apply_strategic_merge_patch(document, patch) == {"finalizers": ["a", "b"], "taints": [{"key": "b"}]}
