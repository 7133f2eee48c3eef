"""Watch a job on the stand-in cluster: its pods, their ranks, and what rank 0 prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.core_v1 import Pod as PodModel
from lightkube.resources.core_v1 import Pod

from demo.job import NAMESPACE

HyperPodPyTorchJob = create_namespaced_resource(
    group="sagemaker.amazonaws.com", version="v1", kind="HyperPodPyTorchJob", plural="hyperpodpytorchjobs"
)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one rank runs."""

    rank: int
    pod_name: str
    pod_uid: str
    node_name: str


class JobWatch:
    """Reads one job. Every call asks the API server; nothing is remembered but what was already printed."""

    def __init__(self, client: Client, job_name: str) -> None:
        self._client = client
        self._job_name = job_name
        self._read: dict[str, int] = {}

    def placements(self) -> tuple[Placement, ...]:
        """The job's pods that have a node, by rank."""
        pods = self._client.list(Pod, namespace=NAMESPACE, labels={"HPJob": self._job_name})
        placed = [_placement(pod) for pod in pods if pod.spec and pod.spec.nodeName]
        return tuple(sorted(placed, key=lambda placement: placement.rank))

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """JSON lines that rank 0 has printed since the last call, of whichever pod has that rank now."""
        for placement in self.placements():
            if placement.rank != 0:
                continue
            try:
                log = "".join(self._client.log(placement.pod_name, namespace=NAMESPACE))
            except ApiError as error:
                if error.status.code in (400, 404):  # not started yet, or gone between the two calls
                    return
                raise
            lines = log.splitlines(keepends=True)
            complete = [line for line in lines if line.endswith("\n")]
            seen = self._read.get(placement.pod_uid, 0)
            self._read[placement.pod_uid] = len(complete)
            for line in complete[seen:]:
                if line.startswith("{"):
                    yield json.loads(line)

    def failure(self) -> str | None:
        """Why the job failed for good, or None."""
        job = self._client.get(HyperPodPyTorchJob, self._job_name, namespace=NAMESPACE)
        for condition in (job.status or {}).get("conditions", []):
            if condition["type"] == "Failed" and condition["status"] == "True":
                return str(condition.get("message") or condition.get("reason") or "the job failed")
        return None

    def last_words(self, lines: int = 15) -> str:
        """The end of every pod's log, for the person who has to find out why."""
        parts = []
        for placement in self.placements():
            tail = list(self._client.log(placement.pod_name, namespace=NAMESPACE, tail_lines=lines))
            parts.append(f"--- rank {placement.rank} on {placement.node_name}\n{''.join(tail)}")
        return "\n".join(parts)


def _placement(pod: PodModel) -> Placement:
    assert pod.metadata
    assert pod.spec
    environment = {entry.name: entry.value for entry in pod.spec.containers[0].env or []}
    return Placement(
        rank=int(environment.get("RANK") or -1),
        pod_name=pod.metadata.name or "",
        pod_uid=pod.metadata.uid or "",
        node_name=pod.spec.nodeName or "",
    )
