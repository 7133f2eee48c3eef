"""One incident from its alarm to its end, with a person who answers and cures; and what must hold then."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lightkube.core.exceptions import ApiError

from benchmarks.recovery_jobs import JobShape, WaitingJob
from benchmarks.recovery_world import (
    BUCKET,
    PATIENCE_SECONDS,
    SUSPECT_STEP,
    TRUSTED_STEP,
    Alarmed,
    RecoveryWorld,
    StuckError,
)
from local_stack.edge.call_faults import CallFault

MOST_INTERVENTIONS = 3
"""Beside one for every fault."""
QUARANTINE = "truestep.ai/quarantine"


@dataclass(kw_only=True)
class Ending:
    """How a run ended. `problems` is empty where everything that must hold does."""

    end: str = ""
    """``recovered``; ``escalated``: a person had to cure and choose where it goes on, and then it recovered; ``stuck``:
    neither, and the deployment cannot be used for another run."""
    stopped_at: list[str] = field(default_factory=list)
    """States at which people were needed; ``dead letter`` where an event had to be sent again."""
    struck: list[int] = field(default_factory=list)
    """How often each of the faults hit."""
    problems: list[str] = field(default_factory=list)
    incident_id: str = ""
    seconds_to_cordon: float | None = None
    """From the alarm to the cordon; waits between tries are shortened by the world's `time_scale`."""
    seconds_to_directive: float | None = None
    """From the new node's readiness to the order to resume."""


class Story:
    """One incident of one job. approve: what the person answers; alone: no other incident runs beside it."""

    def __init__(
        self, world: RecoveryWorld, name: str, *, approve: bool, shape: JobShape | None = None, alone: bool = True
    ) -> None:
        self._world = world
        self._alone = alone
        self._approve = approve
        self._instances = {node["instance_id"]: node["node_name"] for node in world.nodes()}
        world.forget_health_checks()
        self._job = world.start_job(name, shape)
        self._ending = Ending()
        self._alarmed: Alarmed | None = None
        self._told: set[str] = set()
        self._unheard: dict[str, str] = {}
        self._faults: dict[int, CallFault] = {}

    def tell(self, faults: Sequence[CallFault] = ()) -> Ending:
        """Raise the alarm with the faults set, see it through, and judge the end. The job is deleted."""
        self._faults = dict(enumerate(faults))
        self._ending.struck = [0] * len(faults)
        self._world.stack.set_call_faults(faults)
        return self.go_on(self._world.raise_alarm(self._job))

    @property
    def job(self) -> WaitingJob:
        """The job that trains."""
        return self._job

    def go_on(self, alarmed: Alarmed) -> Ending:
        """See an alarm through that has been sent already, and judge the end. The job is deleted."""
        world, ending = self._world, self._ending
        try:
            self._alarmed = alarmed
            self._see_through()
            self._count_strikes()
            ending.end = "escalated" if ending.stopped_at else "recovered"
            self._judge()
        except StuckError as stuck:
            self._count_strikes()
            ending.end = "stuck"
            ending.problems.append(str(stuck))
        finally:
            world.last_calls = world.stack.call_faults()["seen"]
            world.stack.set_call_faults([])
            self._job.delete()
        return ending

    def _see_through(self) -> None:
        last, since = "", time.monotonic()
        while True:
            if not self._ending.incident_id and self._alarmed is not None:
                self._ending.incident_id = self._world.incident_id_of(self._alarmed.alarm)
            incident = self._world.incident(self._ending.incident_id) if self._ending.incident_id else {}
            seen = json.dumps([incident.get("version"), incident.get("status")])
            if seen != last:
                last, since = seen, time.monotonic()
            if incident.get("status") == "closed" and self._over():
                return
            self._act(incident)
            if time.monotonic() - since > PATIENCE_SECONDS * (1 if self._alone else 4):
                where = incident.get("timeline", [{}])[-1]
                raise StuckError(f"stuck in status {incident.get('status')}, after {where}, {self._execution_status()}")
            time.sleep(0.1 if self._alone else 5.0)

    def _over(self) -> bool:
        """Whether the execution has ended: what follows the record of the end belongs to the run."""
        return self._execution_status() != "RUNNING"

    def _execution_status(self) -> str:
        return str(self._world.execution(self._ending.incident_id).get("status", "never started"))

    def _act(self, incident: dict[str, Any]) -> None:
        """What people and training do in this moment."""
        world, status = self._world, incident.get("status")
        if letters := world.dead_letters():
            self._cure("dead letter")
            world.redrive(letters)
        elif self._unheard:
            # The page said that it failed: people press the button again.
            self._press(incident, **self._unheard)
        elif status == "awaiting_approval" and not (incident["approval"] or {}).get("decision"):
            self._press(incident, decision="approve" if self._approve else "reject", comment="a person")
        elif status == "escalated" and not incident["escalation"]["resume_from"]:
            self._let_go_on(incident)
        elif status == "verifying" and "VerifyRecovery" not in self._told:
            self._told.add("VerifyRecovery")
            world.verified(incident)

    def _press(self, incident: dict[str, Any], **form: str) -> int:
        link = self._world.link(incident["incident_id"])
        status = self._world.post(link, **form) if link else 0
        self._unheard = form if status >= 500 else {}
        return status

    def _let_go_on(self, incident: dict[str, Any]) -> None:
        stop = incident["escalation"]
        link = self._world.link(incident["incident_id"])
        if not link or not stop["announced_at"]:
            return
        state = stop["failed_state"]
        self._ending.problems += self._unsafe(incident)
        self._cure(state)
        if len(self._ending.stopped_at) > MOST_INTERVENTIONS + len(self._ending.struck):
            raise StuckError(f"stops again and again: {self._ending.stopped_at}: {stop['error']} {stop['cause']}")
        self._press(incident, decision="resume", resume_from=state)

    def _cure(self, where: str) -> None:
        """End the faults that have struck, and note that people had to."""
        self._count_strikes()
        self._faults = {index: fault for index, fault in self._faults.items() if not self._ending.struck[index]}
        self._world.stack.set_call_faults(self._faults.values())
        self._ending.stopped_at.append(where)

    def _count_strikes(self) -> None:
        for index, hits in zip(self._faults, self._world.stack.call_faults()["struck"], strict=True):
            self._ending.struck[index] += hits

    # --- what must hold ------------------------------------------------------------------------------------------

    def _unsafe(self, incident: dict[str, Any]) -> list[str]:
        """What is not safe while the incident waits for a person."""
        problems = []
        outcomes = {entry["state"]: entry["outcome"] for entry in incident["timeline"]}
        (suspect,) = incident["suspects"]
        decision = (incident["approval"] or {}).get("decision") or {"approved": True}
        # A person's no opens the node, before the state that does it can say so.
        held = outcomes.get("CordonNode") == "cordoned" and decision["approved"]
        if held and suspect["node_name"] in {node["node_name"] for node in self._world.nodes()}:
            try:
                node = self._world.node(suspect["node_name"])
                taints = [taint.value for taint in node.spec.taints or [] if taint.key == QUARANTINE]
                if not node.spec.unschedulable or taints != [incident["incident_id"]]:
                    problems.append(f"escalated with {suspect['node_name']} open: {node.spec.taints}")
            except ApiError as error:
                if error.status.code != 404:
                    raise
        # Not what Relaunch answered: its answer may be what could not be stored, after the job had been let run.
        ordered = json.loads(self._job.directive() or "{}").get("incident_id") == incident["incident_id"]
        if outcomes.get("StopTraining") == "stopped" and not ordered and self._job.pods():
            problems.append("escalated with pods of the stopped job")
        if not incident["approval"] and self._replaced():
            problems.append("replaced without a question")
        return problems

    def _replaced(self) -> set[str]:
        now = {node["instance_id"] for node in self._world.nodes()}
        return set(self._instances) - now

    def _judge(self) -> None:
        """What must hold once the incident is closed."""
        incident = self._world.incident(self._ending.incident_id)
        self._measure(incident)
        claims = {
            "execution": self._execution_status() == "SUCCEEDED",
            "one decision on record": [e["outcome"] for e in incident["timeline"] if e["state"] == "Decision"].count(
                "approved" if self._approve else "rejected"
            )
            == 1,
            "people were told of the end": any(
                "closed" in one for one in self._world.subjects(incident["incident_id"])
            ),
            "evidence kept": bool(incident["evidence"]) or "SnapshotEvidence" not in str(incident["timeline"]),
            **self._cluster_claims(incident),
            **self._table_claims(incident),
        }
        self._ending.problems += [claim for claim, holds in claims.items() if not holds]

    def _measure(self, incident: dict[str, Any]) -> None:
        (suspect,) = incident["suspects"]
        if suspect["cordon"]:
            self._ending.seconds_to_cordon = _between(incident["alarm"]["detected_at"], suspect["cordon"]["at"])
        order = json.loads(self._job.directive() or "{}")
        if self._approve and order and (suspect["replacement"] or {}).get("ready_at"):
            self._ending.seconds_to_directive = _between(suspect["replacement"]["ready_at"], order["issued_at"])

    def _cluster_claims(self, incident: dict[str, Any]) -> dict[str, bool]:
        (suspect,) = incident["suspects"]
        wanted = {suspect["instance_id"]} if self._approve else set()
        listed = self._world.nodes()
        if not self._alone:
            ours = {suspect["node_name"], (suspect["replacement"] or {}).get("new_node_name")}
            listed = [node for node in listed if node["node_name"] in ours]
        nodes = [self._world.node(node["node_name"]) for node in listed]
        order = json.loads(self._job.directive() or "{}")
        pods = self._job.pods()
        return {
            f"replaced exactly {sorted(wanted)}, not {sorted(self._replaced())}": self._replaced() == wanted
            or (not self._alone and wanted <= self._replaced()),
            "as many nodes as before": not self._alone or len(listed) == len(self._instances),
            "no quarantine is left behind": all(
                QUARANTINE not in (node.metadata.annotations or {})
                and QUARANTINE not in {taint.key for taint in node.spec.taints or []}
                for node in nodes
            ),
            "every node takes pods but the one that people closed": sorted(
                node.metadata.name for node in nodes if node.spec.unschedulable
            )
            == sorted(self._world.closed_by_people if self._alone else ()),
            # One that may not be deleted ends by itself, and the timeline says so.
            "no confirmation is left behind unsaid": all(
                f"{name} is left to end by itself" in str(incident["timeline"])
                for name in self._world.confirmations(incident["incident_id"])
            ),
            "the job runs": not self._job.suspended() and self._job.all_run(),
            "on other hardware": not self._approve
            or all(pod["spec"]["nodeName"] != suspect["node_name"] for pod in pods),
            "from the trusted checkpoint": str(order.get("checkpoint_uri", "")).endswith(f"step-{TRUSTED_STEP:08d}"),
        }

    def _table_claims(self, incident: dict[str, Any]) -> dict[str, bool]:
        (suspect,) = incident["suspects"]
        job = incident["job"]
        key = f"{job['cluster_arn']}#{job['namespace']}#{job['kind']}#{job['name']}"
        listed = self._world.stack.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{self._job.name}/")["Contents"]
        revoked = f"{self._job.name}/step-{SUSPECT_STEP:08d}/revoked.json" in {entry["Key"] for entry in listed}
        taken = self._world.item(f"BREAKER#{job['cluster_arn']}", "RECORD").get("nodes", {}).get("SS", [])
        return {
            "the job's claim is given back": not self._world.item(f"JOB#{key}", "CLAIM"),
            "the node's claim is given back": not self._world.item(f"NODE#{suspect['claim_key']}", "CLAIM"),
            "the breaker's place is given back": suspect["claim_key"] not in taken,
            "checkpoints of the suspect window are revoked after an approval alone": revoked == self._approve,
        }


def _between(earlier: str, later: str) -> float:
    """Seconds between two times in ISO 8601."""
    return round((datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds(), 2)
