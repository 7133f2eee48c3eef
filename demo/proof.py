"""What the demo claims at its end; each claim is checked against what the stand-ins saw, not what we reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lambdas.domain.incident import Incident


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


Proof = tuple[str, str, bool]


def proofs(incident: Incident, truth: GroundTruth) -> Sequence[Proof]:
    """Claim, what was seen, whether it holds."""
    alarm = incident.alarm
    suspect = alarm.suspects[0] if len(alarm.suspects) == 1 else None
    named = (suspect.rank, suspect.node_name, suspect.gpu_uuid) if suspect else ()
    choice = incident.checkpoint
    chosen = choice.checkpoint.step if choice else -1
    return (
        (
            "the faulty rank, node and GPU are named, and nobody else",
            f"rank {suspect.rank}, {suspect.node_name}, {suspect.gpu_uuid}"
            if suspect
            else f"{len(alarm.suspects)} suspects",
            named == (truth.faulty_rank, truth.faulty_node, truth.faulty_gpu),
        ),
        ("the fault-free run raises no alarm", f"{truth.reference_alarms} alarms", truth.reference_alarms == 0),
        (
            "the node is cordoned through the Kubernetes API",
            "unschedulable, tainted" if truth.cordon_seen else "not seen",
            truth.cordon_seen,
        ),
        (
            "the node is replaced once, by BatchReplaceClusterNodes",
            f"{truth.replace_calls} call(s); {truth.faulty_instance} is gone",
            truth.replace_calls == 1 and truth.faulty_node not in truth.nodes_after,
        ),
        ("the resumed pods run on the new node", truth.new_node, truth.new_node in truth.nodes_after),
        (
            "resumed from the trusted checkpoint, not the latest",
            f"step {chosen} chosen, step {truth.latest_written_step} was the latest",
            0 <= chosen < truth.latest_written_step and truth.resumed_step == chosen + 1,
        ),
        (
            "final weights are bit-identical to the fault-free run's",
            "equal" if truth.reference_fingerprint == truth.recovered_fingerprint else "different",
            bool(truth.reference_fingerprint) and truth.reference_fingerprint == truth.recovered_fingerprint,
        ),
    )
