"""HyperPod's job auto-resume, as far as a recovery meets it: an annotated job that has lost its pods is let run again.

What the service's controller does with a job that somebody suspends is not documented; this one takes a suspended job
without pods for one to resume, which is the worst that a recovery can meet. The annotation counts on the job, where
AWS documents it, and on its pod templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from local_stack.cluster.controller import Controller
from local_stack.cluster.events import record_event
from local_stack.cluster.job_forms import JOB_FORMS, JobForm
from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.registry import Registry
from local_stack.cluster.kubernetes.store import Json

ENABLED = "sagemaker.amazonaws.com/enable-job-auto-resume"
MOST = "sagemaker.amazonaws.com/job-max-retry-count"
_COMPONENT = "hyperpod-job-auto-resume"


class AutoResume(Controller):
    """Reverts a suspension, at most as often as the job's annotation says; without one, every time."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "auto-resume")

    def reconcile(self) -> float | None:
        """One pass over all jobs that were started before, are suspended, and have no pod left."""
        for form in JOB_FORMS:
            for job in self.registry.select(form.resource)[0]:
                status = job.get("status") or {}
                stopped = form.suspended(job) and status.get("startCount") and not status.get("launched")
                limit = annotation(job, MOST)
                spent = status.get("autoResumeCount", 0)
                if stopped and annotation(job, ENABLED) == "true" and (limit is None or spent < int(limit)):
                    self._resume(form, job, spent + 1)
        return None

    def _resume(self, form: JobForm, job: Json, count: int) -> None:
        metadata = job["metadata"]

        def counted(current: Json) -> Json:
            current.setdefault("status", {})["autoResumeCount"] = count
            return current

        def resumed(current: Json) -> Json:
            if current["metadata"]["uid"] == metadata["uid"]:
                form.set_suspended(current, False)
            return current

        try:
            self.registry.update(form.resource, metadata["namespace"], metadata["name"], counted, status=True)
            self.registry.update(form.resource, metadata["namespace"], metadata["name"], resumed)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            return
        record_event(
            self.registry, job, "AutoResumed", f"Resume {count} of the job.", component=_COMPONENT, warning=False
        )


def annotation(job: Json, name: str) -> str | None:
    """The annotation on the job, or else on one of its pod templates."""
    own = (job["metadata"].get("annotations") or {}).get(name)
    return (
        own if own is not None else next((found[name] for found in _of_templates(job["spec"]) if name in found), None)
    )


def _of_templates(value: Any) -> Iterator[dict[str, str]]:
    if isinstance(value, dict):
        if isinstance(value.get("template"), dict):
            yield (value["template"].get("metadata") or {}).get("annotations") or {}
        for inner in value.values():
            yield from _of_templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _of_templates(inner)
