"""Kueue, as far as a recovery meets it: it owns the ``suspend`` of jobs that name a queue, and reverts others' writes.

A new job that names one is suspended until it is admitted: at once, unless a LocalQueue of that name is held
(``spec.stopPolicy``). With a Workload's ``spec.active`` false the job is suspended and stays so. In a namespace that
has `MANAGED_LABEL` new jobs that name no queue are suspended too, for good (``manageJobsWithoutQueueName``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Set

from local_stack.cluster.controller import Controller
from local_stack.cluster.job_forms import JOB_FORMS, JobForm
from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.registry import Registry
from local_stack.cluster.kubernetes.resources import LOCAL_QUEUES, NAMESPACES, WORKLOADS, Resource
from local_stack.cluster.kubernetes.store import Json

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_LABEL = "kueue-managed"
"""Of a namespace, with any value: what this Kueue's ``managedJobsNamespaceSelector`` selects."""
_FORMS = {form.resource: form for form in JOB_FORMS}


def workload_name(kind: str, job_name: str, uid: str) -> str:
    """Name of the job's Workload: kind, name and five characters of a hash, as Kueue makes them."""
    return f"{kind.lower()}-{job_name}-{hashlib.sha256(uid.encode()).hexdigest()[:5]}"


class Kueue(Controller):
    """Keeps one Workload a queued job, and the job's switch as the Workload says."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "kueue")
        registry.webhooks.append(self._suspend_new)

    def reconcile(self) -> float | None:
        """One pass over all queued jobs, and over the Workloads of jobs that are gone."""
        workloads, _ = self.registry.select(WORKLOADS)
        held = {
            (queue["metadata"]["namespace"], queue["metadata"]["name"])
            for queue in self.registry.select(LOCAL_QUEUES)[0]
            if queue.get("spec", {}).get("stopPolicy", "None") != "None"
        }
        by_owner = {one["metadata"]["ownerReferences"][0]["uid"]: one for one in workloads}
        for form in JOB_FORMS:
            for job in self.registry.select(form.resource)[0]:
                if QUEUE_LABEL in (job["metadata"].get("labels") or {}):
                    self._keep(form, job, by_owner.pop(job["metadata"]["uid"], None), held)
        for orphan in by_owner.values():
            self.registry.delete(WORKLOADS, orphan["metadata"]["namespace"], orphan["metadata"]["name"])
        return None

    def _suspend_new(self, resource: Resource, job: Json) -> None:
        form, metadata = _FORMS.get(resource), job["metadata"]
        if form is None or not isinstance(job.get("spec"), dict):
            return
        namespace = self.registry.find(NAMESPACES, "", metadata["namespace"]) or {"metadata": {}}
        managed = MANAGED_LABEL in (namespace["metadata"].get("labels") or {})
        if managed or QUEUE_LABEL in (metadata.get("labels") or {}):
            form.set_suspended(job, True)

    def _keep(self, form: JobForm, job: Json, workload: Json | None, held: Set[tuple[str, str]]) -> None:
        metadata = job["metadata"]
        if workload is None:
            self.registry.create(WORKLOADS, metadata["namespace"], _workload(form, job))
            return
        # A held queue admits nothing more; what it has admitted runs on.
        waits = form.suspended(job) and (metadata["namespace"], workload["spec"]["queueName"]) in held
        suspended = waits or not workload["spec"].get("active", True)
        if form.suspended(job) == suspended:
            return

        def switched(current: Json) -> Json:
            if current["metadata"]["uid"] == metadata["uid"]:
                form.set_suspended(current, suspended)
            return current

        try:
            self.registry.update(form.resource, metadata["namespace"], metadata["name"], switched)
        except ApiError as error:
            if error.code not in (404, 409):
                raise


def _workload(form: JobForm, job: Json) -> Json:
    metadata = job["metadata"]
    owner = {
        "apiVersion": form.resource.api_version,
        "kind": form.resource.kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {
        "metadata": {
            "name": workload_name(form.resource.kind, metadata["name"], metadata["uid"]),
            "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
            "ownerReferences": [owner],
        },
        "spec": {"active": True, "queueName": metadata["labels"][QUEUE_LABEL], "podSets": []},
    }
