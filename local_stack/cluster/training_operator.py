"""The training operators in one: turns jobs of every kind into pods, and restarts all of a job's when one fails."""

from __future__ import annotations

import copy
import random
import socket
from collections.abc import Sequence
from typing import Any

from local_stack.cluster.controller import Controller
from local_stack.cluster.events import record_event
from local_stack.cluster.job_forms import JOB_FORMS, JobForm, PodPlan, is_job_pod
from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.registry import Registry, now_rfc3339
from local_stack.cluster.kubernetes.resources import PODS
from local_stack.cluster.kubernetes.store import Json

_COMPONENT = "training-job-controller"
_TERMINAL = ("Completed", "Failed")


def assign_ranks(pod_names: Sequence[str], seed: str) -> dict[str, int]:
    """A rank for every pod, in a seeded order that is never the pods' own: a pod's index says nothing of its rank."""
    ranks = list(range(len(pod_names)))
    random.Random(seed).shuffle(ranks)  # noqa: S311 - not a secret, reproducible on purpose
    if len(ranks) > 1 and ranks == sorted(ranks):
        ranks = [*ranks[1:], ranks[0]]
    return dict(zip(pod_names, ranks, strict=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def condition_is_true(job: Json, condition_type: str) -> bool:
    """Whether the job's status says so."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(item["type"] == condition_type and item["status"] == "True" for item in conditions)


class TrainingOperator(Controller):
    """Reconciles every training job.

    Status: `conditions` (the newest last), `startCount` (times that pods were created), `restartCount` (failures that
    were answered by a restart of the whole job), `launched`, `masterPort`, `latestFaultyPodInstanceList`.
    """

    def __init__(self, registry: Registry, seed: int) -> None:
        super().__init__(registry, "training-operator")
        self._seed = seed

    def reconcile(self) -> float | None:
        """One pass over all jobs, and over the pods of jobs that are gone."""
        jobs = [(form, job) for form in JOB_FORMS for job in self.registry.select(form.resource)[0]]
        pods, _ = self.registry.select(PODS)
        owned: dict[str, list[Json]] = {job["metadata"]["uid"]: [] for _, job in jobs}
        for pod in filter(is_job_pod, pods):
            owner = next((reference["uid"] for reference in pod["metadata"].get("ownerReferences") or []), None)
            if owner in owned:
                owned[owner].append(pod)
            elif owner is not None:
                self._delete([pod])
        for form, job in jobs:
            self._reconcile_job(form, job, owned[job["metadata"]["uid"]])
        return None

    def _reconcile_job(self, form: JobForm, job: Json, pods: list[Json]) -> None:
        status = job.get("status") or {}
        if any(condition_is_true(job, condition) for condition in _TERMINAL):
            self._clean(job, pods)
        elif "deletionTimestamp" in job["metadata"]:
            self._delete(pods)
        elif form.suspended(job):
            self._suspend(form, job, pods)
        elif not status.get("launched"):
            # Names are reused: a new pod can only come when the old one is gone.
            self._delete(pods)
            if not pods:
                self._launch(form, job)
        else:
            self._follow(form, job, pods)

    def _suspend(self, form: JobForm, job: Json, pods: list[Json]) -> None:
        self._delete(pods)
        if pods:
            self._set_status(form, job, launched=False)
        elif not condition_is_true(job, "Suspended"):
            self._set_status(form, job, "Suspended", "JobSuspended", "No pod of the job is left.", launched=False)

    def _launch(self, form: JobForm, job: Json) -> None:
        metadata = job["metadata"]
        start_count = (job.get("status") or {}).get("startCount", 0) + 1
        try:
            plans = form.plans(job)
        except (KeyError, TypeError, AttributeError) as error:
            self._set_status(form, job, "Failed", "InvalidSpec", f"no pods can be made of it: {error!r}")
            return
        seed = f"{self._seed}:{metadata['namespace']}/{metadata['name']}:{start_count}"
        names = [plan.name for plan in plans]
        ranks = assign_ranks(names, seed) if form.shuffles_ranks else {name: at for at, name in enumerate(names)}
        port = _free_port()
        message = f"Start {start_count}: {len(plans)} pods."
        self._set_status(
            form, job, "Created", "PodsCreated", message, launched=True, startCount=start_count, masterPort=port
        )
        for plan in plans:
            environment = {
                "RANK": ranks[plan.name],
                "GROUP_RANK": ranks[plan.name],
                "WORLD_SIZE": len(plans),
                "NNODES": len(plans),
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "NPROC_PER_NODE": 1,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "JOB_RESTART_COUNT": start_count - 1,
            }
            pod = _pod(form, job, plan, {key: str(value) for key, value in environment.items()})
            try:
                self.registry.create(PODS, metadata["namespace"], pod)
            except ApiError as error:
                # Another try would be refused as well: the template is wrong, or the pod's name is taken.
                self._set_status(form, job, "Failed", "PodRefused", error.message, launched=False)
                return

    def _follow(self, form: JobForm, job: Json, pods: list[Json]) -> None:
        expected = {plan.name for plan in form.plans(job)}
        phases = {pod["metadata"]["name"]: (pod.get("status") or {}).get("phase", "Pending") for pod in pods}
        failed = [pod for pod in pods if phases[pod["metadata"]["name"]] == "Failed"]
        # A pod that somebody deletes, or that went with its node, is as lost as one that failed.
        lost = sorted(expected - set(phases)) + [
            pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]
        ]
        if failed or lost:
            names = [pod["metadata"]["name"] for pod in failed] + lost
            self._answer_failure(form, job, pods, sorted(set(names)))
        elif all(phase == "Succeeded" for phase in phases.values()):
            self._set_status(form, job, "Completed", "JobCompleted", "Every pod succeeded.", launched=False)
        elif "Pending" not in phases.values() and not condition_is_true(job, "Running"):
            self._set_status(form, job, "Running", "PodsRunning", "Every pod runs.")

    def _answer_failure(self, form: JobForm, job: Json, pods: list[Json], names: list[str]) -> None:
        status = job.get("status") or {}
        restarts = status.get("restartCount", 0)
        allowed = form.retries(job)
        instances = [
            pod["spec"]["nodeName"].removeprefix("hyperpod-")
            for pod in pods
            if pod["metadata"]["name"] in names and pod["spec"].get("nodeName")
        ]
        what = f"{', '.join(names)} failed or went away"
        if restarts >= allowed:
            message = f"{what}; {restarts} of {allowed} restarts used."
            self._set_status(
                form, job, "Failed", "RetriesExhausted", message, launched=False, latestFaultyPodInstanceList=instances
            )
            self._delete([pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")])
        else:
            message = f"{what}; restart {restarts + 1} of {allowed}."
            self._set_status(
                form, job, "Restarting", "PodFailed", message,
                launched=False, restartCount=restarts + 1, latestFaultyPodInstanceList=instances,
            )  # fmt: skip
            self._delete(pods)

    def _clean(self, job: Json, pods: list[Json]) -> None:
        policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy", "None")
        if policy == "All":
            self._delete(pods)
        elif policy == "OnlyComplete":
            self._delete([pod for pod in pods if (pod.get("status") or {}).get("phase") == "Succeeded"])

    def _delete(self, pods: list[Json]) -> None:
        for pod in pods:
            metadata = pod["metadata"]
            current = self.registry.find(PODS, metadata["namespace"], metadata["name"])
            if current is None or current["metadata"]["uid"] != metadata["uid"]:
                continue
            if "deletionTimestamp" not in current["metadata"]:
                self.registry.delete(PODS, metadata["namespace"], metadata["name"], uid=metadata["uid"])

    def _set_status(
        self, form: JobForm, job: Json, condition_type: str = "", reason: str = "", message: str = "", **values: Any
    ) -> None:
        metadata = job["metadata"]

        def posted(current: Json) -> Json:
            status = current.setdefault("status", {})
            status.update(values)
            if condition_type:
                conditions = [
                    {**item, "status": "False"}
                    for item in status.get("conditions") or []
                    if item["type"] != condition_type
                ]
                now = now_rfc3339()
                conditions.append(
                    {
                        "type": condition_type, "status": "True", "reason": reason, "message": message,
                        "lastTransitionTime": now, "lastUpdateTime": now,
                    }
                )  # fmt: skip
                status["conditions"] = conditions
            return current

        self.registry.update(form.resource, metadata["namespace"], metadata["name"], posted, status=True)
        if condition_type:
            warning = condition_type in ("Failed", "Restarting")
            record_event(self.registry, job, reason, message, component=_COMPONENT, warning=warning)


def _pod(form: JobForm, job: Json, plan: PodPlan, environment: dict[str, str]) -> Json:
    metadata = copy.deepcopy(plan.template.get("metadata") or {})
    spec = copy.deepcopy(plan.template["spec"])
    spec["restartPolicy"] = "Never"
    for container in spec["containers"]:
        own = [variable for variable in container.get("env") or [] if variable["name"] not in environment]
        container["env"] = [*own, *({"name": key, "value": value} for key, value in environment.items())]
    return {
        "metadata": {
            "name": plan.name,
            "labels": {**(metadata.get("labels") or {}), **plan.labels, form.label: job["metadata"]["name"]},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [
                {
                    "apiVersion": form.resource.api_version,
                    "kind": form.resource.kind,
                    "name": job["metadata"]["name"],
                    "uid": job["metadata"]["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": spec,
    }
