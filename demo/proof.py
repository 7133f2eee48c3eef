"""What the demo claims at its end; each claim is checked against what the stand-ins saw, not what we reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lambdas.domain.incident import Incident
from truestep.contract.words import counted


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """What really happened, known from the hardware's and the control planes' side."""

    faulty_node: str
    faulty_instance: str
    faulty_gpu: str
    faulty_rank: int
    """Rank that the training operator gave to the pod on the faulty node."""
    replace_calls: int
    """`BatchReplaceClusterNodes` calls that the control plane received."""
    cordon_seen: bool
    """Whether the Kubernetes API showed the node unschedulable with our taint while the incident was open."""
    nodes_after: tuple[str, ...]
    """Nodes on which the pods ran after the relaunch."""
    new_node: str
    latest_written_step: int
    """Step of the newest checkpoint that existed when the alarm fired."""
    resumed_step: int
    """First step that the relaunched run trained."""
    reference_fingerprint: str
    recovered_fingerprint: str
    reference_alarms: int
    """Alarms raised by the fault-free run."""
    released: bool = False
    """Whether the accused node takes pods again at the end."""


Proof = tuple[str, str, bool]
"""Claim, what was seen, whether it holds."""


def the_fault_is_named(incident: Incident, truth: GroundTruth) -> Proof:
    alarm = incident.alarm
    suspect = alarm.suspects[0] if len(alarm.suspects) == 1 else None
    named = (suspect.rank, suspect.node_name, suspect.gpu_uuid) if suspect else ()
    return (
        "the faulty rank, node and GPU are named, and nobody else",
        f"rank {suspect.rank}, {suspect.node_name}, {suspect.gpu_uuid}"
        if suspect
        else f"{len(alarm.suspects)} suspects",
        named == (truth.faulty_rank, truth.faulty_node, truth.faulty_gpu),
    )


def the_reference_is_silent(_incident: Incident, truth: GroundTruth) -> Proof:
    return ("the fault-free run raises no alarm", f"{truth.reference_alarms} alarms", truth.reference_alarms == 0)


def the_node_is_cordoned(_incident: Incident, truth: GroundTruth) -> Proof:
    return (
        "the node is cordoned through the Kubernetes API",
        "unschedulable, tainted" if truth.cordon_seen else "not seen",
        truth.cordon_seen,
    )


def the_fault_is_confirmed(incident: Incident, truth: GroundTruth) -> Proof:
    nodes = incident.confirmation.nodes if incident.confirmation else ()
    suspects = {
        (node.node_name, gpu.gpu_uuid): gpu.differing / gpu.runs
        for node in nodes
        for gpu in node.gpus
        if node.suspect and gpu.runs
    }
    healthy = [gpu for node in nodes for gpu in node.gpus if not node.suspect]
    rates = ", ".join(f"hit rate {share:.0%}" for share in suspects.values()) or "not run"
    beside = f"{sum(gpu.differing for gpu in healthy)} of {sum(gpu.runs for gpu in healthy)} runs on a healthy node"
    return (
        "repeated in a fresh process, the faulty GPU fails again, and a healthy one does not",
        f"{rates}; {beside}",
        suspects.keys() == {(truth.faulty_node, truth.faulty_gpu)}
        and all(suspects.values())
        and any(gpu.runs for gpu in healthy)
        and not any(gpu.differing for gpu in healthy),
    )


def the_node_is_replaced_once(_incident: Incident, truth: GroundTruth) -> Proof:
    return (
        "the node is replaced once, by BatchReplaceClusterNodes",
        f"{counted(truth.replace_calls, 'call')}; {truth.faulty_instance} is gone",
        truth.replace_calls == 1 and truth.faulty_node not in truth.nodes_after,
    )


def hyperpod_replaced_it_itself(_incident: Incident, truth: GroundTruth) -> Proof:
    return (
        "HyperPod had replaced the node after its failed health check, and nobody replaced it again",
        f"{counted(truth.replace_calls, 'call')}; {truth.faulty_instance} is gone",
        truth.replace_calls == 0 and truth.faulty_node not in truth.nodes_after,
    )


def the_new_node_is_used(_incident: Incident, truth: GroundTruth) -> Proof:
    return ("the resumed pods run on the new node", truth.new_node, truth.new_node in truth.nodes_after)


def the_node_is_released(_incident: Incident, truth: GroundTruth) -> Proof:
    return (
        "the node is released after the rejection, and nothing is replaced",
        f"{'open' if truth.released else 'still quarantined'}; {counted(truth.replace_calls, 'call')}",
        truth.released and truth.replace_calls == 0,
    )


def it_resumes_from_the_trusted_checkpoint(incident: Incident, truth: GroundTruth) -> Proof:
    chosen = incident.checkpoint.checkpoint.step if incident.checkpoint else -1
    return (
        "resumed from the trusted checkpoint",
        f"step {chosen} chosen, step {truth.latest_written_step} was the latest",
        0 <= chosen <= truth.latest_written_step and truth.resumed_step == chosen + 1,
    )


def it_does_not_resume_from_the_latest(incident: Incident, truth: GroundTruth) -> Proof:
    chosen = incident.checkpoint.checkpoint.step if incident.checkpoint else -1
    return (
        "resumed from the trusted checkpoint, not the latest",
        f"step {chosen} chosen, step {truth.latest_written_step} was the latest",
        0 <= chosen < truth.latest_written_step and truth.resumed_step == chosen + 1,
    )


def the_weights_are_identical(_incident: Incident, truth: GroundTruth) -> Proof:
    return (
        "final weights are bit-identical to the fault-free run's",
        "equal" if truth.reference_fingerprint == truth.recovered_fingerprint else "different",
        bool(truth.reference_fingerprint) and truth.reference_fingerprint == truth.recovered_fingerprint,
    )


Claim = Callable[[Incident, GroundTruth], Proof]
RECOVERED: tuple[Claim, ...] = (
    the_fault_is_named,
    the_reference_is_silent,
    the_node_is_cordoned,
    the_fault_is_confirmed,
    the_node_is_replaced_once,
    the_new_node_is_used,
    it_does_not_resume_from_the_latest,
    the_weights_are_identical,
)
"""What the default story claims."""


def instead(claims: Sequence[Claim], *changes: tuple[Claim, Claim | None]) -> tuple[Claim, ...]:
    """The claims with some replaced by others, or left out."""
    new = dict(changes)
    return tuple(claim for old in claims if (claim := new.get(old, old)) is not None)
