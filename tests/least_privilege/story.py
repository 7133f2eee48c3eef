"""A rejected alarm, a recurrence that is approved, a verdict without hardware, refused events, and a dry run.

Together they take every function through everything that it may do; the record of it is what the policies are held
against.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job

from local_stack import LocalStack
from local_stack.access_keys import ADMINISTRATOR, SECRET_ACCESS_KEY
from tests.least_privilege import training_pod
from tests.least_privilege.world import NAMESPACE, REPOSITORY, World, until
from tests.unit.bundle.computation import ALARM as BUNDLED
from tests.unit.bundle.computation import Witness
from truestep.contract import training_source

FLIP = {"site": "module_output", "target": "blocks.0", "element": 3, "bit": 20}
"""What is wrong with the suspect's GPU."""
ALARM, VERIFIED = "Training Corruption Alarm", "Training Verified"


@dataclass
class Story:
    """What happened, for the tests to look at."""

    world: World
    assembly: Path
    rejected: dict[str, Any] = field(default_factory=dict)
    approved: dict[str, Any] = field(default_factory=dict)
    rehearsed: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    """What the tests need to know of a moment that has passed."""

    @property
    def stack(self) -> LocalStack:
        return self.world.stack

    def tell(self) -> None:
        world = self.world
        pods = world.start_job()
        until(self._checkpoint_reported, "the checkpoints of the job")
        world.send(ALARM, _accuses_nobody(world.alarm(pods)))
        for kind, detail in ((ALARM, world.alarm(pods)), (VERIFIED, {"run": world.alarm(pods)["run"]})):
            world.send(kind, detail, source=f"{training_source(world.cluster_arn, NAMESPACE)}-elsewhere")
        self._reject(pods)
        self._approve()
        self._rehearse()
        world.end(self.stack.outputs["ApproveStateMachineArn"])
        until(lambda: self._dead_letters() == 3, "the refused events in the dead-letter queue")

    def _reject(self, pods: list[Any]) -> None:
        world = self.world
        written = Witness().write(self.assembly.parent / "bundles")
        alarm = _accuses_two(world.alarm(pods), written["bundle_uri"])
        suspect, innocent = (row["node_name"] for row in alarm["suspects"])
        self.stack.set_fault(suspect, FLIP)
        world.send(ALARM, alarm)
        incident_id = world.incident_of(alarm)
        link = world.link(incident_id)
        self.stack.set_fault(suspect, None)
        self.seen["cordoned"], self.seen["cleared"] = world.node(suspect), world.node(innocent)
        self.seen["jobs_while_asking"] = list(world.client.list(Job, namespace=NAMESPACE))
        self.seen["pods_while_asking"] = world.pods()
        self.seen["page"] = world.page(link)
        self.seen["picture"] = world.picture(link)
        self.seen["refused"] = [
            world.decide_in_console(incident_id, "reject"),
            world.decide_in_console("inc-nowhere", "approve"),
        ]
        world.decide(link, "reject")
        self.seen["refused"].append(world.decide_in_console(incident_id, "approve"))
        self.rejected = world.wait_for(incident_id, "verifying")
        self.seen["released"] = world.node(suspect)

    def _approve(self) -> None:
        world = self.world
        world.set_policy("start_health_check", "settle_health_check", health_check="after_approval")
        alarm = world.alarm(world.running_pods())
        world.send(ALARM, alarm)
        incident_id = world.incident_of(alarm)
        world.wait_for(incident_id, "awaiting_approval")
        # SettleHealthCheck has something to put back.
        world.lose_our_taint(alarm["suspects"][0]["node_name"])
        self._end_what_was_superseded(self.rejected["incident_id"])
        self.seen["approval"] = world.decide_in_console(incident_id, "approve", comment="a test", acknowledge=True)
        incident = world.wait_for(incident_id, "verifying")
        run = alarm["run"]
        verified = {"schema_version": 1, "run": run, "incident_id": incident_id, "step": 29, "nodes": []}
        world.send(VERIFIED, verified | {"checkpoint": incident["checkpoint"]["checkpoint"]})
        self.approved = world.wait_for(incident_id, "closed")

    def _end_what_was_superseded(self, incident_id: str) -> None:
        """The alarm after the relaunch stops the earlier incident; gone on, it stops again: another has the job now.

        Choices are left behind as one leaves them that was recorded before it lost its job. Its execution is stopped by
        hand with such a choice, which the successor takes, and again without one.
        """
        world = self.world
        world.wait_for(incident_id, "escalated")
        self.seen["started_beside"] = world.start_by_hand(incident_id)
        stop = world.incident(incident_id)["escalation"]
        world.record_choice(world.incident(incident_id), "OpenIncident")
        world.abort(incident_id)
        stop = self._stopped_again(incident_id, stop)
        # The heartbeat's reminder finds a choice whose delivery was lost.
        world.record_choice(world.incident(incident_id), "OpenIncident")
        event = {"incident_id": incident_id, "task_token": stop["task_token"], "failed_state": "OpenIncident"}
        world.invoke("escalate", **event)
        stop = self._stopped_again(incident_id, stop)
        world.abort(stop["execution"].rpartition(":")[2])

        def told_of_the_end() -> bool:
            found = world.incident(incident_id)["escalation"]
            return bool(not found["task_token"] and found["announced_at"])

        until(told_of_the_end, "people to be told that the execution was stopped")
        self.seen["told_of_the_end"] = world.incident(incident_id)["escalation"]
        world.decide(world.link(incident_id), "resume", resume_from="CloseIncident")
        self.rejected = world.wait_for(incident_id, "closed")

    def _stopped_again(self, incident_id: str, earlier: dict[str, Any]) -> dict[str, Any]:
        """The incident's stop once it waits anew at OpenIncident."""

        def found() -> dict[str, Any]:
            stop: dict[str, Any] = self.world.incident(incident_id)["escalation"]
            waits = stop["task_token"] and not stop["resume_from"]
            # What is written last, so that nothing else writes now.
            anew = stop["announced_at"] and stop["task_token"] != earlier["task_token"]
            return stop if stop["failed_state"] == "OpenIncident" and waits and anew else {}

        return until(found, "the incident to stop again")

    def _rehearse(self) -> None:
        """The operator's commands. A drill answers its own questions."""
        world = self.world
        self.seen["console"] = world.page(json.loads(self.command("incidents", "console").stdout)["url"])
        self.seen["access"] = json.loads(self.command("check-access").stdout)
        node = world.running_pods()[0].spec.nodeName
        self.seen["node_before"] = world.node(node)
        before = self._records()
        done = self.command("drill", "--cluster-arn", world.cluster_arn, "--node", node, "--timeout-seconds", "240")
        assert done.returncode == 0, done.stderr
        self.seen["during_drill"] = [now[len(then) :] for then, now in zip(before, self._records(), strict=True)]
        self.seen["node_after"] = world.node(node)
        self.rehearsed = world.wait_for(json.loads(done.stdout)["incident_id"], "closed")

    def _records(self) -> list[list[dict[str, Any]]]:
        """What was asked of AWS and of Kubernetes so far, and what subscribers were told."""
        return [self.stack.calls(), self.stack.kubernetes_requests(), self.stack.sns_messages()]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``truestep`` against this deployment, as people do."""
        outputs = self.assembly.parent / "outputs.json"
        outputs.write_text(json.dumps({"truestep-story": dict(self.stack.outputs)}))
        command = [sys.executable, "-m", "truestep.cli", *arguments, "--stage", "story", "--outputs", str(outputs)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "trainer_sdk" / "src"),
            "AWS_ENDPOINT_URL": self.stack.endpoint_url,
            "AWS_REGION": self.stack.region,
            "AWS_ACCESS_KEY_ID": ADMINISTRATOR,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        }
        return subprocess.run(
            [*command, "--json"], env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    def _checkpoint_reported(self) -> bool:
        table = self.stack.outputs["TableName"]
        items = self.stack.client("dynamodb").scan(TableName=table)["Items"]
        return any(item["SK"]["S"].startswith(f"CHECKPOINT#{training_pod.TRUSTED_STEP:08d}#") for item in items)

    def _dead_letters(self) -> int:
        sqs = self.stack.client("sqs")
        (url,) = sqs.list_queues()["QueueUrls"]
        name = "ApproximateNumberOfMessages"
        return int(sqs.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name])


def _accuses_nobody(alarm: dict[str, Any]) -> dict[str, Any]:
    verdict = {"kind": "numerics", "reason": "the loss is NaN on every rank alike", "suspects": [], "witnesses": []}
    return alarm | {"verdict": verdict, "suspects": [], "witnesses": []}


def _accuses_two(alarm: dict[str, Any], bundle_uri: str) -> dict[str, Any]:
    """One pass of which two ranks have different results; the bundle has its computation."""
    suspects, witnesses = [alarm["suspects"][0], alarm["witnesses"][0]], alarm["witnesses"][1:]
    verdict = alarm["verdict"] | {"kind": "ambiguous", "suspects": [row["rank"] for row in suspects]}
    verdict |= {"witnesses": [row["rank"] for row in witnesses]}
    changes = {"alarm_id": BUNDLED, "suspects": suspects, "witnesses": witnesses, "verdict": verdict}
    return alarm | changes | {"evidence": {"bundle_uri": bundle_uri}}
