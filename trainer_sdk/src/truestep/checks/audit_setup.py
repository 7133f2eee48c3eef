"""What a guard's audits are made of, and what keeps them from working in this run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from truestep.attachment import Attachment
from truestep.checks.buckets import unreplayable_modules
from truestep.checks.ring_replay import AuditSetupError, RingReplayAudit
from truestep.checks.topology import Ring, TopologyError
from truestep.contract import NodeName, Rank
from truestep.identity import software_differences
from truestep.replay import ComputeLoss, RebuildBatch
from truestep.schedule import Schedule


def ring_of(nodes: Mapping[Rank, NodeName], schedule: Schedule) -> Ring | None:
    """Who replays whom; None where the nodes do not make a ring and no audit needs one.

    Raises `TopologyError` where one does.
    """
    try:
        return Ring(nodes)
    except TopologyError:
        if schedule.audit_every is not None:
            raise
        return None


def audit_of(
    attachment: Attachment,
    module: nn.Module,
    ring: Ring | None,
    schedule: Schedule,
    compute_loss: ComputeLoss | None,
    rebuild_batch: RebuildBatch | None,
) -> RingReplayAudit | None:
    """None where the schedule has no audits. module: the one inside DDP.

    Raises `AuditSetupError` where audits cannot work in this run.
    """
    if schedule.audit_every is None or ring is None:
        return None
    if compute_loss is None:
        raise AuditSetupError("audits replay compute_loss(model, batch): give it to the guard, or set audit_every=None")
    blocked = unreplayable_modules(module)
    if blocked:
        raise AuditSetupError(
            f"one rank alone cannot replay SyncBatchNorm ({', '.join(blocked[:4])}): its forward communicates; "
            "use BatchNorm or GroupNorm, or set audit_every=None"
        )
    differences = software_differences(attachment.identities)
    if differences:
        raise AuditSetupError(f"ranks cannot be compared bit for bit: {'; '.join(differences)}; make them equal")
    return RingReplayAudit(
        attachment, module, ring, compute_loss, rebuild_batch, compare_gradients=schedule.deterministic_audits
    )
