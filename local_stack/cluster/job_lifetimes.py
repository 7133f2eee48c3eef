"""Ends Jobs that run longer than `activeDeadlineSeconds`, and removes ended ones after `ttlSecondsAfterFinished`."""

from __future__ import annotations

from datetime import UTC, datetime

from local_stack.cluster.controller import Controller
from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.registry import Registry, now_rfc3339
from local_stack.cluster.kubernetes.resources import JOBS, PODS
from local_stack.cluster.kubernetes.store import Json
from local_stack.cluster.training_operator import condition_is_true

_ENDS = ("Completed", "Failed")


class JobLifetimes(Controller):
    """Watches the clocks of Jobs; starting and following them is the training operator's."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "job-lifetimes")

    def reconcile(self) -> float | None:
        """One pass over all Jobs; the seconds until the next of their times is over."""
        now = datetime.now(UTC)
        left = [self._watch(job, now) for job in self.registry.select(JOBS)[0]]
        return min((seconds for seconds in left if seconds is not None), default=None)

    def _watch(self, job: Json, now: datetime) -> float | None:
        """Seconds until one of the Job's times is over; None where none is running, or where it has just been."""
        spec, metadata = job["spec"], job["metadata"]
        ended = next((condition for condition in _ENDS if condition_is_true(job, condition)), "")
        limit = spec.get("ttlSecondsAfterFinished" if ended else "activeDeadlineSeconds")
        if limit is None or "deletionTimestamp" in metadata or (not ended and spec.get("suspend")):
            return None
        since = _transition(job, ended) if ended else metadata["creationTimestamp"]
        left = float(limit) - (now - datetime.fromisoformat(since)).total_seconds()
        if left > 0:
            return left
        if ended:
            self._remove(job)
        else:
            self._end(job)
        return None

    def _end(self, job: Json) -> None:
        metadata = job["metadata"]

        def failed(current: Json) -> Json:
            status = current.setdefault("status", {})
            others = [{**item, "status": "False"} for item in status.get("conditions") or []]
            condition = {
                "type": "Failed", "status": "True", "reason": "DeadlineExceeded", "lastTransitionTime": now_rfc3339(),
                "message": "Job was active longer than specified deadline",
            }  # fmt: skip
            status.update(launched=False, conditions=[*others, condition])
            return current

        self.registry.update(JOBS, metadata["namespace"], metadata["name"], failed, status=True)
        for pod in self.registry.select(PODS, metadata["namespace"])[0]:
            owners = {owner["uid"] for owner in pod["metadata"].get("ownerReferences") or []}
            if metadata["uid"] in owners and "deletionTimestamp" not in pod["metadata"]:
                self.registry.delete(PODS, metadata["namespace"], pod["metadata"]["name"], uid=pod["metadata"]["uid"])

    def _remove(self, job: Json) -> None:
        metadata = job["metadata"]
        try:
            self.registry.delete(JOBS, metadata["namespace"], metadata["name"], uid=metadata["uid"])
        except ApiError as error:
            if error.code not in (404, 409):
                raise


def _transition(job: Json, condition_type: str) -> str:
    conditions = job["status"]["conditions"]
    return str(next(item["lastTransitionTime"] for item in conditions if item["type"] == condition_type))
