"""Opens incidents about real pods of the cluster stand-in, and runs the states' handlers on them."""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
import uuid
from datetime import UTC, datetime
from typing import Any

import boto3
from lightkube.core.exceptions import ApiError

from lambdas.adapters.decision_mac import KmsDecisionMacs
from lambdas.adapters.store import DynamoIncidentStore
from lambdas.domain.approval import decided
from lambdas.domain.decision import digest_of, question, signed
from lambdas.domain.incident import Incident, iso, open_incident
from lambdas.domain.policy import Policy
from tests.adapters.cluster.world import HYPERPOD_ARN, NAMESPACE, World, unique
from truestep.contract import (
    Alarm,
    AlarmId,
    Check,
    IdentityRow,
    NodeName,
    Rank,
    RunRef,
    Step,
    Verdict,
    VerdictKind,
)


class Recovery:
    """The recovery as the tests drive it: one incident at a time, one state at a time."""

    def __init__(self, world: World, bucket: str) -> None:
        self.world = world
        self.bucket = bucket
        self.store = DynamoIncidentStore(boto3.client("dynamodb"), os.environ["TRUESTEP_TABLE"])
        self._jobs: list[str] = []

    def open(
        self,
        *,
        dry_run: bool = False,
        kind: VerdictKind = VerdictKind.CONCLUSIVE,
        approved: bool | None = None,
        stubborn: bool = False,
        checkpoint_root: str = "",
        accused: int = 1,
        labels: dict[str, str] | None = None,
        config_map: str = "",
        **alarm: Any,
    ) -> Incident:
        """Start a job and open an incident about its first pods' nodes; a stubborn one ignores SIGTERM for 3 s.

        accused: suspects, of the job's two pods. labels: of the job. config_map: variables of its pods. alarm: fields
        of the alarm that differ.
        """
        job = unique("job")
        self._jobs.append(job)
        pods = self.world.start_job(job, stubborn=stubborn, labels=labels, config_map=config_map)[:accused]
        raised = dataclasses.replace(self._alarm(job, pods, kind, checkpoint_root), **alarm)
        incident = open_incident(raised, now=datetime.now(UTC), dry_run=dry_run)
        opened = self.store.open(incident)
        return opened if approved is None else self.decide(opened.incident_id, approve=approved)

    def run(self, function: str, incident_id: str) -> dict[str, Any]:
        """Invoke the function's handler once."""
        handler = importlib.import_module(f"lambdas.{function}.handler").handler
        answer: dict[str, Any] = handler({"incident_id": incident_id}, None)
        return answer

    def settle(
        self, function: str, incident_id: str, seconds: float = 20.0, *, poll_seconds: float = 0.1
    ) -> dict[str, Any]:
        """Invoke the function's handler until it answers something else than pending."""
        deadline = time.monotonic() + seconds
        while (answer := self.run(function, incident_id))["outcome"] == "pending":
            assert answer["wait_seconds"] >= 1
            assert time.monotonic() < deadline, f"{function} is still pending: {answer['reason']}"
            time.sleep(poll_seconds)
        return answer

    def decide(self, incident_id: str, *, approve: bool = True) -> Incident:
        """Record a person's decision about the suspects as they are now, as decide_approval does."""
        now = datetime.now(UTC)
        incident = self.load(incident_id)
        asked = incident.evolve(approval=incident.approval or question(now, Policy(), task_token=""))
        decided_on = decided(asked, approve=approve, by="by link", comment="seen", now=now)
        assert decided_on.approval is not None
        assert decided_on.approval.decision is not None
        macs = KmsDecisionMacs(boto3.client("kms"), os.environ["TRUESTEP_DECISION_KEY_ID"])
        return self.store.save(signed(decided_on, macs.sign(digest_of(decided_on, decided_on.approval.decision))))

    def load(self, incident_id: str) -> Incident:
        return self.store.load(incident_id)

    def clean_up(self) -> None:
        """Delete the jobs, and take what a failed test left on the nodes off again."""
        for job in self._jobs:
            self.world.delete_job(job)
        for node in self.world.nodes():
            try:
                found = self.world.node(node["node_name"])
            except ApiError as error:
                if error.status.code == 404:  # an instance that is being replaced has left already
                    continue
                raise
            taints = [
                taint for taint in found["spec"].get("taints") or [] if not taint["key"].startswith("truestep.ai/")
            ]
            self.world.edit_node(
                node["node_name"],
                {
                    "metadata": {"annotations": {"truestep.ai/quarantine": None}},
                    "spec": {"unschedulable": None, "taints": taints},
                },
            )

    def _alarm(self, job: str, pods: list[dict[str, Any]], kind: VerdictKind, checkpoint_root: str) -> Alarm:
        gpus = {node["node_name"]: node["gpu_uuids"][0] for node in self.world.nodes()}
        rows = tuple(
            IdentityRow(
                rank=Rank(rank),
                local_rank=0,
                node_name=NodeName(pod["spec"]["nodeName"]),
                pod_name=pod["metadata"]["name"],
                pod_uid=pod["metadata"]["uid"],
                namespace=NAMESPACE,
                job_name=job,
                gpu_uuid=gpus[pod["spec"]["nodeName"]],
            )
            for rank, pod in enumerate(pods, start=1)
        )
        run = RunRef(
            run_id="run-1",
            attempt_id="attempt-1",
            world_size=2,
            cluster_arn=HYPERPOD_ARN,
            region="us-east-1",
            namespace=NAMESPACE,
            job_name=job,
            checkpoint_root=checkpoint_root or f"s3://{self.bucket}/run-1",
        )
        return Alarm(
            alarm_id=AlarmId(uuid.uuid4().hex),
            run=run,
            check=Check.RING_REPLAY,
            step=Step(120),
            verdict=Verdict(
                kind=kind, reason="Rank 1 differs from two replays.", suspects=tuple(row.rank for row in rows)
            ),
            suspects=rows,
            clean_through=Step(110),
            detected_at=iso(datetime.now(UTC)),
        )


def with_suspect(incident: Incident, **changes: Any) -> Incident:
    """The incident with its only suspect changed."""
    (suspect,) = incident.suspects
    return incident.evolve(suspects=(dataclasses.replace(suspect, **changes),))
