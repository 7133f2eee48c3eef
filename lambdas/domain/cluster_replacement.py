"""Replacing an instance: what the control plane's answer means, and when the new one can be used. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NOT_FOUND_CODE = "InstanceIdNotFound"
_BUSY_CODES = ("InvalidInstanceStatus", "InstanceIdInUse")
_LEAVING_STATUSES = ("ShuttingDown", "Pending", "NotFound")

_ADVICE = {
    NOT_FOUND_CODE: "the cluster has no such instance and this incident never asked for its replacement: check which "
    "instance the node is on now",
    "InvalidInstanceStatus": "the instance is in a state that cannot be replaced (it may be updating, shutting down or "
    "under a health check): wait for it to be Running or Failure, then resume the incident at ReplaceNode",
    "InstanceIdInUse": "another operation holds the instance: wait for it to end, then resume the incident at "
    "ReplaceNode; if the cluster is older than the feature, run UpdateClusterSoftware first",
}


@dataclass(frozen=True, kw_only=True)
class ReplaceAnswer:
    """What BatchReplaceClusterNodes said about the one instance that it was asked about."""

    accepted: bool
    code: str = ""
    message: str = ""
    repeated: bool = False
    """The client had sent the request before without an answer: that one may have arrived."""


class ReplaceStanding(StrEnum):
    """Where a replacement stands after an answer."""

    REQUESTED = "requested"
    ALREADY_REPLACED = "already_replaced"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class ReplaceJudgement:
    """The standing and the sentence that explains it."""

    standing: ReplaceStanding
    reason: str


@dataclass(frozen=True, kw_only=True)
class ReadyJudgement:
    """Whether the replacement can be used, and what is missing."""

    ready: bool
    reason: str


def read_replace_answer(answer: Mapping[str, Any], instance_id: str) -> ReplaceAnswer:
    """Find the instance in a partial-success answer; an instance in neither list was not accepted."""
    if instance_id in (answer.get("Successful") or ()):
        return ReplaceAnswer(accepted=True)
    repeated = bool((answer.get("ResponseMetadata") or {}).get("RetryAttempts"))
    for failure in answer.get("Failed") or ():
        if failure["NodeId"] == instance_id:
            code, message = failure["ErrorCode"], failure["Message"]
            return ReplaceAnswer(accepted=False, code=code, message=message, repeated=repeated)
    return ReplaceAnswer(accepted=False, code="Unanswered", message="the answer does not mention the instance")


def judge_replace(
    answer: ReplaceAnswer, instance_id: str, *, intended_before: bool, status_now: str = ""
) -> ReplaceJudgement:
    """What an answer means for the incident.

    intended_before: an earlier run had recorded the intent to replace this instance. The request has no client token,
    so "not found" after that, or after a request that the client repeated, is the mark of an earlier one that arrived,
    not a failure.
    status_now: ``InstanceStatus.Status`` of the instance after a refusal; empty where it is gone.
    """
    if answer.accepted:
        return ReplaceJudgement(
            standing=ReplaceStanding.REQUESTED, reason=f"HyperPod accepted the replacement of {instance_id}"
        )
    asked_before = intended_before or answer.repeated
    if answer.code == NOT_FOUND_CODE and asked_before:
        return ReplaceJudgement(
            standing=ReplaceStanding.ALREADY_REPLACED,
            reason=f"{instance_id} is gone: an earlier request of this incident had replaced it",
        )
    if asked_before and answer.code in _BUSY_CODES and status_now in ("", *_LEAVING_STATUSES):
        return ReplaceJudgement(
            standing=ReplaceStanding.ALREADY_REPLACED,
            reason=f"{instance_id} is {status_now or 'gone'}: an earlier request of this incident is replacing it",
        )
    advice = _ADVICE.get(answer.code, "see the message, then resume the incident at ReplaceNode")
    return ReplaceJudgement(
        standing=ReplaceStanding.REFUSED,
        reason=f"HyperPod refused to replace {instance_id}: {answer.code} ({answer.message}): {advice}",
    )


def judge_ready(
    *, old_instance_id: str, instance_id: str, status: str, message: str, node: tuple[bool, str] | None
) -> ReadyJudgement:
    """Ready: a *new* instance is Running and its Kubernetes node takes pods.

    instance_id, status, message: of the instance that the logical id names now; empty where there is none.
    node: `is_schedulable` of the new instance's node; None where it has not joined.
    """
    if not instance_id:
        return ReadyJudgement(ready=False, reason="no instance holds the place yet: it is being provisioned")
    if instance_id == old_instance_id:
        return ReadyJudgement(
            ready=False, reason=f"the place is still held by the old instance {old_instance_id} ({status})"
        )
    if status != "Running":
        detail = f": {message}" if message else ""
        return ReadyJudgement(ready=False, reason=f"the new instance {instance_id} is {status}{detail}")
    if node is None:
        return ReadyJudgement(ready=False, reason=f"the new instance {instance_id} runs, its node has not joined yet")
    schedulable, sentence = node
    return ReadyJudgement(ready=schedulable, reason=f"new instance {instance_id}: {sentence}")
