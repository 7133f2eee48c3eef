"""What the control plane's answers mean, also after a crash between the intent and the answer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lambdas.domain.cluster_replacement import ReplaceStanding, judge_ready, judge_replace, read_replace_answer

OLD = "i-0123456789abcdef0"
OK = {"Successful": [OLD], "Failed": []}


def failed(code: str) -> dict[str, object]:
    return {"Successful": [], "Failed": [{"NodeId": OLD, "ErrorCode": code, "Message": "because"}]}


def standing(answer: Mapping[str, object], *, before: bool = False, status: str = "Running") -> ReplaceStanding:
    return judge_replace(read_replace_answer(answer, OLD), OLD, intended_before=before, status_now=status).standing


def test_an_accepted_request_is_requested() -> None:
    assert standing(OK) is ReplaceStanding.REQUESTED


def test_not_found_is_success_only_after_a_recorded_intent() -> None:
    assert standing(failed("InstanceIdNotFound"), before=True, status="") is ReplaceStanding.ALREADY_REPLACED
    assert standing(failed("InstanceIdNotFound"), before=False, status="") is ReplaceStanding.REFUSED


@pytest.mark.parametrize(("code", "status"), [("InstanceIdNotFound", ""), ("InvalidInstanceStatus", "ShuttingDown")])
def test_a_refusal_of_a_request_that_the_client_repeated_is_success_where_the_instance_leaves(
    code: str, status: str
) -> None:
    """The first answer got lost, not the first request; as botocore tells of its own repetitions."""
    repeated = failed(code) | {"ResponseMetadata": {"RetryAttempts": 1}}
    once = failed(code) | {"ResponseMetadata": {"RetryAttempts": 0}}
    assert standing(repeated, status=status) is ReplaceStanding.ALREADY_REPLACED
    assert standing(once, status=status) is ReplaceStanding.REFUSED
    busy = failed("InvalidInstanceStatus") | {"ResponseMetadata": {"RetryAttempts": 1}}
    assert standing(busy, status="Running") is ReplaceStanding.REFUSED


@pytest.mark.parametrize("code", ["InvalidInstanceStatus", "InstanceIdInUse"])
def test_a_busy_instance_is_ours_only_if_it_is_leaving_after_a_recorded_intent(code: str) -> None:
    assert standing(failed(code), before=True, status="ShuttingDown") is ReplaceStanding.ALREADY_REPLACED
    assert standing(failed(code), before=True, status="SystemUpdating") is ReplaceStanding.REFUSED
    assert standing(failed(code), before=False, status="ShuttingDown") is ReplaceStanding.REFUSED


def test_an_answer_that_does_not_mention_the_instance_is_no_success() -> None:
    assert standing({"Successful": ["i-00000000000000000"]}) is ReplaceStanding.REFUSED


def test_a_refusal_says_what_to_do() -> None:
    answer = read_replace_answer(failed("InvalidInstanceStatus"), OLD)
    reason = judge_replace(answer, OLD, intended_before=False).reason
    assert "because" in reason
    assert "resume the incident at ReplaceNode" in reason


def ready(instance_id: str, status: str = "Running", node: tuple[bool, str] | None = (True, "takes pods")) -> bool:
    return judge_ready(old_instance_id=OLD, instance_id=instance_id, status=status, message="", node=node).ready


def test_only_a_new_running_instance_with_a_schedulable_node_is_ready() -> None:
    assert ready("i-new")
    assert not ready("")
    assert not ready(OLD)
    assert not ready("i-new", status="Pending")
    assert not ready("i-new", node=None)
    assert not ready("i-new", node=(False, "cordoned"))
