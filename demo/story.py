"""The default story: a GPU starts to compute wrong, and training ends with the same weights as if it never had."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Namespace, Node

from demo import approval
from demo.follow import HyperPodPyTorchJob, JobWatch, Placement
from demo.incident_watch import EscalatedError, IncidentWatch, approved
from demo.job import NAMESPACE, SHARED_VOLUME, TrainingJob
from demo.proof import RECOVERED, Claim, GroundTruth, Proof
from demo.settings import DemoSettings
from demo.stage import CONTEXT, StoryError, in_a_terminal
from demo.view import View
from lambdas.domain.incident import Incident, IncidentStatus
from local_stack.stack import LocalStack
from truestep.contract import to_json
from truestep.contract.words import counted, plainly

FAULTY_INDEX = 2
"""Which of the nodes is faulty."""
DISPLAY_SECONDS = 0.3
"""How often the display is refreshed; nothing but the display waits for it."""
PATIENCE_SECONDS = 240.0
"""Longest silence of a part that needs no person before it is called stuck."""


@dataclass(frozen=True, kw_only=True)
class FaultyPart:
    """The hardware that computes wrong."""

    node_name: str
    instance_id: str
    gpu_uuid: str


class Story:
    """One run against a running stack: the default story, and what the others change of it."""

    claims: Sequence[Claim] = RECOVERED
    decision = "approve"

    def __init__(self, settings: DemoSettings, view: View, stack: LocalStack) -> None:
        self._settings = settings
        self._view = view
        self._stack = stack
        self._client = stack.kubernetes()
        self._cluster: dict[str, Any] = json.loads(CONTEXT.read_text())["truestep"]["clusters"][0]
        self._recovery = IncidentWatch(stack.client("dynamodb"), stack.outputs["TableName"], view)

    def tell(self) -> int:
        nodes = self.set_up()

        self._view.chapter("2  The same training without a fault, for comparison")
        reference = self._job("gpt-reference")
        reference_print = self._train_to_end(reference)
        reference_alarms = self._recovery.alarms(reference)
        self._view.line(f"final weights {reference_print}")

        self._view.chapter("3  One GPU starts to return wrong numbers")
        faulty = self._break_a_node(nodes[FAULTY_INDEX])
        job = self._job("gpt")
        watch = self._submit(job)
        self._until(lambda: len(watch.placements()) == job.nodes, watch, "the pods to be placed")
        before = watch.placements()
        self._show_placement(before)
        incident = self._until_incident(job, watch)
        self._show_alarm(incident)

        self._view.chapter("4  Recovery")
        self._until_status(IncidentStatus.AWAITING_APPROVAL, watch)
        cordon_seen = self._cordoned(faulty.node_name, incident.incident_id)
        latest_step = self._latest_checkpoint_step(job)
        self.before_the_decision(faulty)
        self._decide(incident)
        start = self._first_step_after_relaunch(job, watch, before)
        after = watch.placements()
        recovered_print = self._train_to_end(job, watch)
        incident = self._until_status(IncidentStatus.CLOSED, watch)

        self._view.chapter("5  Proof")
        replacement = incident.suspects[0].replacement
        truth = GroundTruth(
            faulty_node=faulty.node_name,
            faulty_instance=faulty.instance_id,
            faulty_gpu=faulty.gpu_uuid,
            faulty_rank=next(placed.rank for placed in before if placed.node_name == faulty.node_name),
            replace_calls=sum(call["operation"] == "BatchReplaceClusterNodes" for call in self._stack.calls()),
            cordon_seen=cordon_seen,
            nodes_after=tuple(placed.node_name for placed in after),
            new_node=replacement.new_node_name if replacement else "",
            latest_written_step=latest_step,
            resumed_step=start,
            reference_fingerprint=reference_print,
            recovered_fingerprint=recovered_print,
            reference_alarms=reference_alarms,
            released=self._released(faulty.node_name),
        )
        return self._conclude(incident, truth)

    def set_up(self) -> list[dict[str, Any]]:
        """Make the job's namespace; the cluster's instances."""
        nodes: list[dict[str, Any]] = self._stack.cluster_info()["clusters"][0]["nodes"]
        self._view.line(f"{len(nodes)} nodes with one GPU each, recovery deployed from the synthesised template")
        self._client.create(Namespace.from_dict({"metadata": {"name": NAMESPACE}}))
        return nodes

    # --- what other stories change ---------------------------------------------------------------------------------

    def fault(self) -> dict[str, Any]:
        """What is wrong with the faulty node, as `truestep.inject.Fault` describes it."""
        return {
            "site": "module_output",
            "target": "blocks.1.expand",
            "model": "bit_flip",
            "element": 1000,
            "bit": 20,
            "first_step": self._settings.fault_step,
        }

    def fault_in_words(self, node_name: str) -> str:
        """The fault as it is told to the person who watches."""
        return f"a matrix product on {node_name} has one bit flipped"

    def before_the_decision(self, faulty: FaultyPart) -> None:
        """What happens while the question is open."""

    # --- training ------------------------------------------------------------------------------------------------

    def _job(self, name: str, *, learning_rate: float = 1e-3) -> TrainingJob:
        return TrainingJob(
            learning_rate=learning_rate,
            name=name,
            nodes=self._settings.nodes,
            steps=self._settings.steps,
            cluster_arn=self._cluster["hyperpod_cluster_arn"],
            region=self._stack.region,
            event_bus=self._stack.outputs["EventBusName"],
            checkpoint_bucket=self._cluster["checkpoint_buckets"][0],
        )

    def _submit(self, job: TrainingJob) -> JobWatch:
        self._client.create(HyperPodPyTorchJob.from_dict(job.manifest()))
        self._view.line(
            f"job {job.name}: {job.nodes} ranks, {job.steps} steps, audit every 10, checkpoint every 5; until its "
            "processes have loaded PyTorch nothing is to be seen, on few cores for a minute or more"
        )
        return JobWatch(self._client, job.name)

    def _train_to_end(self, job: TrainingJob, watch: JobWatch | None = None) -> str:
        """Follow the job until it has written its final fingerprint, and return that."""
        watch = watch or self._submit(job)
        final = self._stack.volume_path("fsx") / job.final_directory.removeprefix(SHARED_VOLUME + "/") / "final.json"
        self._until(lambda: self._drawn(job, watch, final.exists()), watch, f"{job.name} to finish")
        self._draw(job, watch)
        self._view.finish_steps(job.name)
        fingerprint: str = json.loads(final.read_text())["fingerprint"]
        return fingerprint

    def _draw(self, job: TrainingJob, watch: JobWatch) -> None:
        for line in watch.new_lines():
            if line["event"] == "step":
                self._view.steps(job.name, step=line["step"], total=job.steps, loss=line["loss"])
            elif line["event"] == "start":
                begins = f"resumes at step {line['start_step']}" if line["start_step"] else "starts at step 0"
                self._view.line(f"{job.name}: {begins} on {', '.join(line['nodes'])}")

    def _drawn(self, job: TrainingJob, watch: JobWatch, finished: bool) -> bool:
        self._draw(job, watch)
        return finished

    def _first_step_after_relaunch(self, job: TrainingJob, watch: JobWatch, before: tuple[Placement, ...]) -> int:
        """The step that the relaunched rank 0 says it starts from."""
        old = {placed.pod_uid for placed in before}
        started: list[int] = []

        def look() -> bool:
            if any(placed.pod_uid in old for placed in watch.placements()):
                return False
            for line in watch.new_lines():
                if line["event"] == "start":
                    started.append(line["start_step"])
                    nodes = ", ".join(line["nodes"])
                    self._view.line(f"{job.name}: resumes at step {line['start_step']} on {nodes}", style="green")
            return bool(started)

        self._until(look, watch, "the job to resume")
        return started[0]

    # --- the fault and the incident ------------------------------------------------------------------------------

    def _break_a_node(self, node: dict[str, Any]) -> FaultyPart:
        faulty = FaultyPart(node_name=node["node_name"], instance_id=node["instance_id"], gpu_uuid=node["gpu_uuids"][0])
        self._stack.set_fault(faulty.node_name, self.fault())
        words = self.fault_in_words(faulty.node_name)
        self._view.line(f"from step {self._settings.fault_step} on, {words}; nothing else is told about it")
        return faulty

    def _until_incident(self, job: TrainingJob, watch: JobWatch) -> Incident:
        found: list[Incident] = []

        def look() -> bool:
            self._draw(job, watch)
            incident = self._recovery.find(job)
            found.extend([incident] if incident else [])
            return bool(found)

        self._until(look, watch, "an alarm")
        self._view.finish_steps(job.name)
        return found[0]

    def _show_alarm(self, incident: Incident) -> None:
        alarm = incident.alarm
        suspects = "\n".join(
            f"rank {row.rank} on {row.node_name}, {row.gpu_uuid}, pod {row.pod_name}" for row in alarm.suspects
        )
        self._view.panel(
            f"Corruption alarm at step {alarm.step} ({plainly(alarm.check)}, {alarm.verdict.kind})",
            f"{alarm.verdict.reason}\n\nsuspect: {suspects}\nclean through step {alarm.clean_through}; the update was "
            f"dropped on every rank and the job holds\nincident {incident.incident_id}",
            style="red",
        )

    def _until_status(self, status: IncidentStatus, watch: JobWatch) -> Incident:
        found: list[Incident] = []

        def look() -> bool:
            incident = self._recovery.poll()
            found[:] = [incident] if incident and incident.status is status else []
            return bool(found)

        self._until(look, watch, f"the incident to be {status}")
        return found[0]

    def _released(self, node_name: str) -> bool:
        if node_name not in {node["node_name"] for node in self._stack.cluster_info()["clusters"][0]["nodes"]}:
            return False
        node = self._client.get(Node, node_name)
        assert node.spec
        return not node.spec.unschedulable and not any(
            taint.key.startswith("truestep") for taint in node.spec.taints or []
        )

    def _cordoned(self, node_name: str, incident_id: str) -> bool:
        try:
            node = self._client.get(Node, node_name)
        except ApiError as error:
            if error.status.code != 404:
                raise
            # HyperPod was faster: what is left is the record of the API server's requests.
            rows = self._stack.kubernetes_requests()
            return any((row["verb"], row["name"], row["allowed"]) == ("patch", node_name, True) for row in rows)
        assert node.spec
        taints = [(taint.key, taint.value) for taint in node.spec.taints or []]
        return bool(node.spec.unschedulable) and ("truestep.ai/quarantine", incident_id) in taints

    def _latest_checkpoint_step(self, job: TrainingJob) -> int:
        """Step of the newest checkpoint with a manifest, straight from the bucket."""
        pages = self._stack.client("s3").get_paginator("list_objects_v2")
        keys = [
            item["Key"]
            for page in pages.paginate(Bucket=job.checkpoint_root.split("/")[2], Prefix=f"{job.name}/step-")
            for item in page.get("Contents", [])
        ]
        return max(int(key.split("/")[1].removeprefix("step-")) for key in keys if key.endswith("/manifest.json"))

    def _decide(self, incident: Incident) -> None:
        link = self._link(incident)
        if not self._settings.approve_automatically and self.decision == "approve":
            self._view.panel(
                "Waiting for your approval",
                "Open the link below: the page says what was found and what approving destroys, and has the buttons.\n"
                "Opening it changes nothing. The demo goes on by itself once you have decided.",
                style="yellow",
            )
            self._view.to_copy(link)
            self._view.line("or in another terminal:")
            self._view.to_copy(in_a_terminal(self._stack, self._settings.state_dir, incident.incident_id))
            self._until(self._decided, None, "your decision", patience_seconds=math.inf)
            return
        page = approval.follow(link, decision=self.decision, comment=f"the demo pressed {self.decision}")
        saved = self._settings.state_dir / "approval.html"
        saved.write_text(page)
        self._view.line(
            f"followed the link of the SNS message and pressed {self.decision}; the page is kept in {saved}"
        )

    def _decided(self) -> bool:
        incident = self._recovery.poll()
        return incident is not None and approved(incident)

    def _link(self, incident: Incident) -> str:
        found: list[str] = []

        def look() -> bool:
            for message in self._stack.sns_messages():
                link = approval.link_in(message["Message"])
                if link and incident.incident_id in link:
                    found.append(link)
            return bool(found)

        self._until(look, None, "the approval link to arrive by SNS")
        return found[-1]

    # --- the end -------------------------------------------------------------------------------------------------

    @staticmethod
    def _accused(incident: Incident) -> set[str]:
        return {suspect.node_name for suspect in incident.suspects}

    def _nothing_replaced(self) -> Proof:
        calls = sum(call["operation"] == "BatchReplaceClusterNodes" for call in self._stack.calls())
        return ("nothing was replaced", counted(calls, "call"), calls == 0)

    def _claim(self, *results: Proof) -> int:
        """Show the claims. Raises `StoryError` where one does not hold."""
        self._view.proofs(results)
        document = {"proofs": [{"claim": claim, "seen": seen, "holds": holds} for claim, seen, holds in results]}
        (self._settings.state_dir / "result.json").write_text(json.dumps(document, indent=2) + "\n")
        failed = [claim for claim, _, holds in results if not holds]
        if failed:
            raise StoryError("these claims do not hold: " + "; ".join(failed))
        self._view.line("every claim holds", style="bold green")
        return 0

    def _conclude(self, incident: Incident, truth: GroundTruth) -> int:
        choice, advice = incident.checkpoint, incident.recommendation
        self._view.facts(
            "Incident",
            {
                "incident": incident.incident_id,
                "verdict": f"{incident.alarm.verdict.kind}, cause {advice.cause if advice else 'open'}",
                "lost steps": str(choice.lost_steps) if choice else "?",
                "opened, closed": f"{incident.opened_at}, {incident.closed_at}",
            },
        )
        results = [claim(incident, truth) for claim in self.claims]
        self._view.proofs(results)
        equal = truth.reference_fingerprint == truth.recovered_fingerprint
        self._view.panel(
            "Final weights",
            f"fault-free run   {truth.reference_fingerprint}\nrecovered run    {truth.recovered_fingerprint}\n\n"
            + ("bit-identical" if equal else "DIFFERENT"),
            style="green" if equal else "red",
        )
        self._write_result(incident, truth, results)
        failed = [claim for claim, _, holds in results if not holds]
        if failed:
            raise StoryError("these claims do not hold: " + "; ".join(failed))
        self._view.line("every claim holds", style="bold green")
        return 0

    def _write_result(self, incident: Incident, truth: GroundTruth, results: Sequence[Proof]) -> None:
        """Keep the outcome as JSON, for scripts and tests."""
        document = {
            "incident_id": incident.incident_id,
            "verdict": to_json(incident.alarm.verdict),
            "reference_fingerprint": truth.reference_fingerprint,
            "recovered_fingerprint": truth.recovered_fingerprint,
            "proofs": [{"claim": claim, "seen": seen, "holds": holds} for claim, seen, holds in results],
            "seconds": round(self._view.elapsed_seconds, 1),
        }
        (self._settings.state_dir / "result.json").write_text(json.dumps(document, indent=2) + "\n")

    def _show_placement(self, placements: tuple[Placement, ...]) -> None:
        for placed in placements:
            self._view.line(f"rank {placed.rank} is pod {placed.pod_name} on {placed.node_name}", style="dim")

    def _until(
        self,
        ready: Callable[[], bool],
        watch: JobWatch | None,
        what: str,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Refresh the display until `ready`. Raises `StoryError` where the job failed or nothing happened for long."""
        self._view.nothing_yet()
        try:
            while not ready():
                self._recovery.poll()
                if watch and (failure := watch.failure()):
                    raise StoryError(f"waiting for {what}, but the job failed: {failure}\n{watch.last_words()}")
                if self._view.quiet_seconds > patience_seconds:
                    words = watch.last_words() if watch else ""
                    raise StoryError(f"nothing happened for {patience_seconds:.0f} s while waiting for {what}\n{words}")
                time.sleep(DISPLAY_SECONDS)
        except EscalatedError as error:
            raise StoryError(str(error)) from error
        except ApiError as error:
            raise StoryError(f"the Kubernetes API refused while waiting for {what}: {error}") from error
