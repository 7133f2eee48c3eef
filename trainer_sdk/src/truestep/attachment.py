"""The start of a guarded run: who takes part, the hook in DDP's reduction, and the group that evidence travels over."""

from __future__ import annotations

import logging
import os
import uuid
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from truestep.checks.buckets import BucketSensor, UserHook, refuse_registered_hook
from truestep.collectives import CpuGroup, data_parallel_group, group_store
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step, TruestepError, from_json, to_json
from truestep.contract.words import counted
from truestep.group_lifetime import keep_until_exit
from truestep.identity import local_identity, run_reference
from truestep.metrics import Counters, WriteMetrics
from truestep.peers import PeerWatch
from truestep.protocols import Reporter, ResumePoint

if TYPE_CHECKING:
    from truestep.doctor.diagnosis import Diagnosis

_log = logging.getLogger(__name__)
_attachments: weakref.WeakKeyDictionary[DistributedDataParallel, Attachment] = weakref.WeakKeyDictionary()

ARBITRATION_NODES = 3
"""A fault is pinned on one of two disagreeing nodes by a third."""


class BannedGpuError(TruestepError):
    """A GPU that an incident banned is part of the run: the node was released or came back under another instance
    id."""


class Membership:
    """Who takes part in a run, and what evidence and alarms travel over."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        cpu_group: CpuGroup,
        identities: Sequence[IdentityRow],
        run: RunRef,
        reporter: Reporter,
        peers: PeerWatch,
    ) -> None:
        """Made by `join`."""
        self.group = group
        """The ranks that take part."""
        self.cpu_group = cpu_group
        self.identities = tuple(identities)
        """Every rank's row, in rank order."""
        self.run = run
        self.reporter = reporter
        self.peers = peers
        """Hears of ranks that failed."""
        self.counters = Counters()
        """What the checks count for the user's plots; see `attach`."""
        self.resumed: ResumePoint | None = None
        """Set by `resume`; None where the run did not go through it."""

    @property
    def rank(self) -> Rank:
        """This process's rank in the group."""
        return Rank(self.cpu_group.rank)

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.cpu_group.size

    @property
    def identity(self) -> IdentityRow:
        """This process's row."""
        return self.identities[self.rank]

    @property
    def nodes(self) -> dict[Rank, NodeName]:
        """Rank -> node name, in rank order."""
        return {row.rank: row.node_name for row in self.identities}


class Attachment(Membership):
    """What `attach` found out and set up; one per DDP model and process. Its group is the data-parallel one."""

    def __init__(self, members: Membership, sensor: BucketSensor) -> None:
        """Made by `attach`."""
        super().__init__(
            group=members.group,
            cpu_group=members.cpu_group,
            identities=members.identities,
            run=members.run,
            reporter=members.reporter,
            peers=members.peers,
        )
        self.sensor = sensor
        self.diagnosis: Diagnosis | None = None
        """What the preflight of this attempt found; None where there was none."""
        self.current_step = Step(0)
        """The step that the guard works on."""
        self.left_over = ""
        """The error over which `train` was left, told to the other ranks or heard from one; empty before."""

    def end_loop(self) -> None:
        """Tell the other ranks that this rank's batches have ended; `train` does so itself. Every rank, after its loop.

        Returns when all have said so, at the latest after `peers.END_SECONDS`. Raises `PeerFailedError` on every rank
        where one has begun a step that another has no batch for: that step would wait for ever.
        """
        self.peers.end_loop()


def attach(
    ddp_model: DistributedDataParallel,
    dp_group: dist.ProcessGroup | None = None,
    *,
    comm_hook: UserHook | None = None,
    metrics: WriteMetrics | None = None,
) -> Attachment:
    """Put the checks into a DDP model. Collective: every rank, before the first forward.

    dp_group: the model's data-parallel group; default: the model's own.
    comm_hook: the communication hook that you would register, or (state, hook); it keeps working, inside ours.
    metrics(values, step): called with the counters of the checks, as `truestep.metrics.Counters` describes; on the
    ranks that give it, and each rank its own. What it raises is logged once and stops nothing.
    Raises `TypeError`/`ValueError` for a model that cannot be attached to, `BannedGpuError` on every rank where one
    rank's GPU is banned.
    """
    if hasattr(ddp_model, "_orig_mod"):
        raise TypeError(
            "attach got torch.compile(DistributedDataParallel(model)), which a replay cannot repeat; compile the "
            "module inside instead: DistributedDataParallel(torch.compile(model))"
        )
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a DistributedDataParallel model, got {type(ddp_model).__name__}; wrap it first (for "
            "fully_shard with replicas there is truestep.ShardedGuard)"
        )
    if ddp_model in _attachments:
        raise ValueError("attach was called for this model before: attach once, and keep what it returned")
    refuse_registered_hook(ddp_model)
    counters = Counters(metrics)
    members = join(data_parallel_group(ddp_model, dp_group))
    attachment = Attachment(members, BucketSensor(ddp_model, members.group, comm_hook))
    attachment.counters = counters
    _attachments[ddp_model] = attachment
    _say_limits(attachment)
    return attachment


def join(group: dist.ProcessGroup) -> Membership:
    """Find out who the ranks of `group` are, and set up what evidence and alarms travel over. Collective.

    Raises `BannedGpuError` on every rank where one rank's GPU is banned.
    """
    cpu_group = CpuGroup(group)
    keep_until_exit(group)
    run = _agree_on_run(cpu_group)
    row = local_identity(cpu_group.rank, run.attempt_id)
    identities = _gather_identities(cpu_group, row)
    return Membership(
        group=group,
        cpu_group=cpu_group,
        identities=identities,
        run=run,
        reporter=_reporter(row, run),
        peers=_watch_peers(group, cpu_group, row),
    )


def attachment_of(ddp_model: torch.nn.Module) -> Attachment:
    """The attachment that `attach` made for this model. Raises `ValueError` where there is none."""
    found = _attachments.get(ddp_model) if isinstance(ddp_model, DistributedDataParallel) else None
    if found is None:
        raise ValueError(
            "this model was not attached; call truestep.attach(ddp_model) on every rank before the first forward"
        )
    return found


def _agree_on_run(cpu_group: CpuGroup) -> RunRef:
    attempt_id = uuid.uuid4().hex
    proposal = {"attempt_id": attempt_id, "run_id": os.environ.get("TRUESTEP_RUN_ID") or attempt_id}
    agreed = cpu_group.gather_rows(proposal)[0]
    return run_reference(agreed["run_id"], agreed["attempt_id"], cpu_group.size)


def _gather_identities(cpu_group: CpuGroup, row: IdentityRow) -> list[IdentityRow]:
    # Whether its own GPU is banned travels in the row: the directive's file may not have reached every node yet.
    own = {"identity": to_json(row), "banned_by": _banning_incident(row)}
    rows = cpu_group.gather_rows(own)
    identities = [from_json(IdentityRow, entry["identity"]) for entry in rows]
    banned = [(i, entry["banned_by"]) for i, entry in zip(identities, rows, strict=True) if entry["banned_by"]]
    if banned:
        named = "; ".join(f"rank {i.rank} on {i.node_name} has {i.gpu_uuid} (incident {by})" for i, by in banned)
        raise BannedGpuError(f"a banned GPU is part of this run: {named}; keep the job off that node or replace it")
    return identities


def _watch_peers(group: dist.ProcessGroup, cpu_group: CpuGroup, row: IdentityRow) -> PeerWatch:
    peers = PeerWatch(group_store(group), row.attempt_id, row.rank, row.node_name, cpu_group.size)
    peers.at_failure(group.abort)  # NCCL lets go of a blocked backward then
    peers.at_failure(cpu_group.interrupt)
    cpu_group.explain_failure = peers.raise_if_failed
    return peers


def _banning_incident(row: IdentityRow) -> str:
    from truestep.directives import read_directive

    directive = read_directive()
    return directive.incident_id if directive and row.gpu_uuid and row.gpu_uuid in directive.banned_gpu_uuids else ""


def _reporter(row: IdentityRow, run: RunRef) -> Reporter:
    from truestep.report import reporter_from_environment

    return reporter_from_environment(row, run)


def _say_limits(attachment: Attachment) -> None:
    if attachment.rank != 0:
        return
    nodes = len(set(attachment.nodes.values()))
    if nodes < ARBITRATION_NODES:
        _log.warning(
            "%s: faults are detected, but naming the faulty one takes %d nodes; every verdict will be "
            "ambiguous. Where there are more, set NODE_NAME on every rank (now: %s)",
            counted(nodes, "node"),
            ARBITRATION_NODES,
            ", ".join(sorted(set(attachment.nodes.values()))),
        )
    if torch.cuda.is_available() and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        _log.warning(
            "CUBLAS_WORKSPACE_CONFIG is not set: set it to :4096:8 so that audited matrix products repeat bit for bit"
        )
