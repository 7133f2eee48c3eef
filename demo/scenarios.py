"""The stories of `make demo`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from demo.proof import (
    RECOVERED,
    hyperpod_replaced_it_itself,
    instead,
    it_does_not_resume_from_the_latest,
    it_resumes_from_the_trusted_checkpoint,
    the_fault_is_confirmed,
    the_new_node_is_used,
    the_node_is_released,
    the_node_is_replaced_once,
)
from demo.settings import DemoSettings
from demo.stage import empty, synthesise
from demo.storm import tell_storm
from demo.story import FAULTY_INDEX, FaultyPart, Story
from demo.view import View
from lambdas.domain.incident import IncidentStatus
from local_stack.stack import LocalStack
from truestep.contract.words import counted

_CAUGHT_AT_ONCE = instead(RECOVERED, (it_does_not_resume_from_the_latest, it_resumes_from_the_trusted_checkpoint))
"""Where a check sees the fault before the next save, the newest checkpoint is the trusted one."""


class OptimizerStory(Story):
    """One value of the optimizer's memory flips: the weights differ only later, and a save would keep it."""

    # Only a pass of forward and backward can be run again from a bundle.
    claims = instead(_CAUGHT_AT_ONCE, (the_fault_is_confirmed, None))

    def fault(self) -> dict[str, Any]:
        return {
            "site": "optimizer_state",
            "target": "blocks.1.expand.weight/exp_avg_sq",
            "element": 1000,
            "bit": 20,
            "passes": 1,
            "first_step": self._settings.fault_step,
        }

    def fault_in_words(self, node_name: str) -> str:
        return f"one bit of the optimizer's state on {node_name} is flipped, once"


class NanOfHardware(Story):
    """One GPU makes a NaN out of healthy inputs."""

    claims = _CAUGHT_AT_ONCE

    def fault(self) -> dict[str, Any]:
        return super().fault() | {"model": "nan"}

    def fault_in_words(self, node_name: str) -> str:
        return f"a matrix product on {node_name} has one NaN"


class NanOfNumerics(Story):
    """The learning rate is far too high: every rank computes the same NaN, and no hardware is accused."""

    def tell(self) -> int:
        nodes = self.set_up()
        self._view.chapter("2  A learning rate that is far too high")
        job = self._job("gpt", learning_rate=1e30)
        watch = self._submit(job)
        told: list[str] = []

        def look() -> bool:
            self._draw(job, watch)
            told[:] = [one["Message"] for one in self._stack.sns_messages() if "no hardware accused" in one["Subject"]]
            return bool(told)

        self._until(look, watch, "people to be told of the NaN")
        self._view.finish_steps(job.name)
        self._view.panel("What people are told", told[0], style="yellow")
        self._view.chapter("3  Proof")
        open_nodes = [node["node_name"] for node in nodes if self._released(node["node_name"])]
        return self._claim(
            ("an alarm was raised", counted(self._recovery.alarms(job), "alarm"), self._recovery.alarms(job) >= 1),
            ("people were told once, and no hardware is accused", counted(len(told), "message"), len(told) == 1),
            ("no incident was opened", "none", self._recovery.find(job) is None),
            ("every node takes pods", f"{len(open_nodes)} of {len(nodes)}", len(open_nodes) == len(nodes)),
            self._nothing_replaced(),
        )


class Rejected(Story):
    """The person does not believe it, and is right: the fault was gone by itself."""

    claims = instead(RECOVERED, (the_node_is_replaced_once, the_node_is_released), (the_new_node_is_used, None))
    decision = "reject"

    def before_the_decision(self, faulty: FaultyPart) -> None:
        self._stack.set_fault(faulty.node_name, None)
        self._view.line(f"whatever was wrong with {faulty.node_name} is over; nothing is told about that either")


class AutoReplaced(Story):
    """The health check fails, and HyperPod replaces the node by itself while people still think."""

    claims = instead(RECOVERED, (the_node_is_replaced_once, hyperpod_replaced_it_itself))

    def set_up(self) -> list[dict[str, Any]]:
        nodes = super().set_up()
        self._stack.set_health_check_outcome(nodes[FAULTY_INDEX]["node_name"], "failed")
        return nodes

    def before_the_decision(self, faulty: FaultyPart) -> None:
        def gone() -> bool:
            nodes = self._stack.cluster_info()["clusters"][0]["nodes"]
            return faulty.instance_id not in {node["instance_id"] for node in nodes}

        self._until(gone, None, "HyperPod to replace the node by itself")
        self._view.line(f"HyperPod has replaced {faulty.instance_id} after its health check failed")


class DryRun(Story):
    """Everything is read, decided, recorded and announced; nothing is changed."""

    def tell(self) -> int:
        nodes = self.set_up()
        self._view.chapter("2  One GPU starts to return wrong numbers")
        faulty = self._break_a_node(nodes[FAULTY_INDEX])
        job = self._job("gpt")
        watch = self._submit(job)
        incident = self._until_incident(job, watch)
        before = watch.placements()
        self._show_alarm(incident)
        self._view.chapter("3  What the recovery would do")
        incident = self._until_status(IncidentStatus.CLOSED, watch)
        self._view.chapter("4  Proof")
        writes = self._writes()
        return self._claim(
            ("the faulty node is named", incident.suspects[0].node_name, self._accused(incident) == {faulty.node_name}),
            ("nothing was written to the Kubernetes API", ", ".join(writes) or "no write", not writes),
            ("the node still takes pods", faulty.node_name, self._released(faulty.node_name)),
            ("the job's pods are the same", f"{counted(len(before), 'pod')}, holding", watch.placements() == before),
            self._nothing_replaced(),
        )

    def _writes(self) -> list[str]:
        """Changes that the functions asked the Kubernetes API for."""
        rows = [row for row in self._stack.kubernetes_requests() if ":role/" in row["user"]]
        return [f"{row['verb']} {row['resource']}" for row in rows if row["verb"] not in ("get", "list")]


_DRY: Mapping[str, Any] = {"dry_run": True}
_STORIES: Mapping[str, tuple[Callable[[DemoSettings, View, LocalStack], Story], Mapping[str, Any]]] = {
    "default": (Story, {}),
    "optimizer": (OptimizerStory, {}),
    "nan-hardware": (NanOfHardware, {}),
    "nan-numerics": (NanOfNumerics, {}),
    "reject": (Rejected, {}),
    "auto-replaced": (AutoReplaced, {}),
    "dry-run": (DryRun, _DRY),
}
"""Name -> story, and the fields of its policy that differ."""


def tell(settings: DemoSettings, view: View) -> int:
    """Run the story. Returns the exit code: 0 if every claim holds."""
    view.chapter("1  A cloud and a cluster on this machine")
    empty(settings.state_dir)
    if settings.scenario == "storm":
        return tell_storm(settings, view)
    template_dir = settings.state_dir / "cdk.out"
    story, policy = _STORIES[settings.scenario]
    synthesise(template_dir, view, policy)
    with LocalStack(settings.state_dir, template_dir) as stack:
        return story(settings, view, stack).tell()
