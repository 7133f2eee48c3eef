"""FSDP2 with replicas (HSDP): shards compared along the replicate dimension.

    fully_shard(model, mesh=init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard")))
    guard = ShardedGuard(model, optimizer, Schedule(audit_every=None, check_every=10), checkpoints=save)
    loop:   loss.backward(); guard.before_update(step); optimizer.step(); guard.after_update(step)
    after:  guard.end_loop()

What this sees: a stored weight or optimizer state, an update, or a reduction that went wrong on one replica; and NaN or
Inf in a gradient, without telling whose it was. What it does not see: a finite fault in a forward or backward, which
reaches every replica alike; the replay audit that sees those is for `DistributedDataParallel` only. So nothing here
makes a checkpoint trusted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from truestep.attachment import Membership, join
from truestep.checkpoints.whole import whole_model, whole_optimizer
from truestep.checks.alarms import NO_AUDITS, AlarmDesk
from truestep.checks.buckets import fetch, nonfinite_flag
from truestep.checks.copies import equal_words, judge_difference
from truestep.checks.finding import Finding
from truestep.checks.ring_replay import AuditSetupError
from truestep.collectives import CpuGroup
from truestep.contract import (
    Check,
    NodeName,
    Rank,
    Step,
    TruestepError,
    Verdict,
    VerdictKind,
    from_json,
    to_json,
)
from truestep.fingerprint import combine, fingerprint_tensors, optimizer_state_tensors
from truestep.judge import judge_unequal_reduction
from truestep.judge_nonfinite import judge_sharded_nonfinite
from truestep.metrics import Counters, WriteMetrics, counted
from truestep.protocols import CheckpointStore, SaveEvidence
from truestep.report.start import announce_start
from truestep.schedule import Schedule

_opening: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""The hook of a model's newest guard: an older one's would open steps that nobody closes."""


class ShardingError(TruestepError):
    """The model is not sharded in a way that leaves copies to compare; says what to change."""


class ShardedGuard:
    """Runs the checks of one sharded model. Every method is called by every rank, at the same step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        checkpoints: CheckpointStore | Callable[[Step], Any] | None = None,
        members: Membership | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        metrics: WriteMetrics | None = None,
    ) -> None:
        """model: after `fully_shard`; optimizer: of its parameters. Collective over all ranks of the job.

        checkpoints: ``VerifiedCheckpoints(root, members, model, optimizer, distributed=True)``, or `callable(step)`;
        called only after weights and optimizer state were compared.
        members: what ``truestep.attachment.join(torch.distributed.group.WORLD)`` returned; None: made here.
        grad_scaler: while its factor is above 1, an overflow is its way of searching and no alarm.
        metrics: as `attach` takes it.
        Raises `ShardingError` where no shard has a second copy, `AuditSetupError` for a schedule with audits.
        """
        if schedule.audit_every is not None:
            raise AuditSetupError(
                "the replay audit is for DistributedDataParallel only: the forward of a sharded model communicates, so "
                "one rank alone cannot repeat it; set Schedule(audit_every=None)"
            )
        mesh, dimension = _replicate_dimension(model)
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._scaler = grad_scaler
        self._members = members or join(_world())
        self._members.counters = Counters(metrics)
        self._checks: dict[str, int] = {}
        self._buffers = self._buffers_now()
        self._written: set[str] = set()
        group = mesh.get_group(dimension)
        self._replicas = CpuGroup(group)
        self._replicas.explain_failure = self._give_up_everybody
        self._members.peers.at_failure(self._replicas.interrupt)
        nodes = self._members.nodes
        self._holders: dict[Rank, NodeName] = {Rank(r): nodes[Rank(r)] for r in dist.get_process_group_ranks(group)}
        self._desk = AlarmDesk(self._members, lambda: None, lambda: NO_AUDITS)
        self._next_step: Step | None = None
        self._open_steps_with_forwards()
        announce_start(self._members.rank, self._members.nodes, schedule, NO_AUDITS)

    clean_through: None = None
    """Nothing here sees a computation fault."""

    @property
    def checks(self) -> dict[str, int]:
        """Check name -> newest step at which it passed on every rank."""
        return dict(self._checks)

    @property
    def holders(self) -> Mapping[Rank, NodeName]:
        """The ranks that hold copies of this rank's shards, with their nodes."""
        return dict(self._holders)

    @counted("_members.counters", last=False)
    def before_update(self, step: int) -> None:
        """Between the backward and the update: the reduced gradients of all replicas are finite and the same.

        Without that a reduction that corrupts what all but one replica receive would make the only right copy the odd
        one out. Raises `CorruptionDetected` on every rank or on none, after the alarm was sent: drop the update.
        Raises `PeerFailedError`, as the forward and `after_update` do, once another rank failed in code of the user's.
        """
        self._desk.raise_again()
        self._members.peers.open_step(Step(step))
        try:
            self._judge_gradients(step)
        finally:
            self._members.peers.close_step()

    def _judge_gradients(self, step: int) -> None:
        self._note_written_buffers()
        gradients = {name: _local(p.grad) for name, p in self._model.named_parameters() if p.grad is not None}
        low, high = self._replicas.extremes([fingerprint_tensors(gradients).word])[0]
        searching = self._scaler is not None and self._scaler.is_enabled() and self._scaler.get_scale() > 1.0
        flags = [] if searching else [nonfinite_flag(gradient) for gradient in gradients.values()]
        nonfinite = bool(flags) and any(fetch(flags)[0])
        (_, somewhere), (_, unequal) = self._members.cpu_group.extremes([int(nonfinite), int(low != high)])
        if somewhere:
            finding = Finding(check=Check.NONFINITE, verdict=judge_sharded_nonfinite(Step(step)))
            self._desk.raise_alarm(finding, Step(step), None)
        if unequal:
            finding = Finding(check=Check.REDUCTION, verdict=judge_unequal_reduction(Step(step)))
            self._desk.raise_alarm(finding, Step(step), None)
        self._checks[Check.NONFINITE] = self._checks[Check.REDUCTION] = step

    @counted("_members.counters", last=True)
    def after_update(self, step: int) -> None:
        """After the update: compares the copies where they are due, then saves where a checkpoint is due.

        Raises `CorruptionDetected` on every rank or on none, after the alarm was sent; nothing was saved then.
        """
        self._desk.raise_again()
        due = Step(step)
        if self._checks.get(Check.NONFINITE) != due:
            raise ValueError(
                f"after_update({step}) without before_update({step}): nobody has judged the gradients of this step. "
                "Call it between the backward and optimizer.step()"
            )
        saving = self._checkpoints is not None and self._schedule.saves(due)
        if saving or self._schedule.compares_weights(due):
            self._compare(Check.WEIGHTS, due, dict(self._model.named_parameters()))
        if saving and self._checkpoints is not None:
            self._compare(Check.OPTIMIZER_STATE, due, optimizer_state_tensors(self._optimizer, self._model))
            self._save(self._checkpoints, due)
        self._next_step = Step(step + 1)
        self._members.peers.await_step(self._next_step)

    def end_loop(self) -> None:
        """Tell the other ranks that this rank's batches have ended. Every rank, after its loop.

        Returns when all have said so, at the latest after `peers.END_SECONDS`. Raises `PeerFailedError` on every rank
        where one has begun a step that another has no batch for: that step would wait for ever.
        """
        self._members.peers.end_loop()

    def _open_steps_with_forwards(self) -> None:
        """A step is open, for the ranks that would wait for this one, from its first forward on, and not from the step
        before: what a rank does alone after the loop, or between two steps, keeps nobody."""
        if self._model in _opening:
            _opening[self._model].remove()
        own = weakref.ref(self)

        def about_to_run(model: nn.Module, _arguments: Any) -> None:
            guard = own()
            if guard is not None and model.training and torch.is_grad_enabled():
                guard._open_step()

        # In front of FSDP's own, which gathers the shards from the other ranks.
        _opening[self._model] = self._model.register_forward_pre_hook(about_to_run, prepend=True)

    def _open_step(self) -> None:
        peers, resumed = self._members.peers, self._members.resumed
        if not peers.in_step:
            first = resumed.start_step if resumed is not None else Step(0)
            peers.open_step(first if self._next_step is None else self._next_step)

    def _give_up_everybody(self) -> None:
        """Who has left the exchange between replicas never enters that of all ranks, in which the others wait."""
        self._members.cpu_group.interrupt()
        self._members.cpu_group.explain_failure()

    def _save(self, checkpoints: CheckpointStore | Callable[[Step], Any], step: Step) -> None:
        if not isinstance(checkpoints, CheckpointStore):
            checkpoints(step)
            return
        table = self._leave_out_local(whole_model(self._model)[1])
        evidence = SaveEvidence(
            step=step,
            weights_fingerprint=combine(table),
            tensor_fingerprints=table,
            optimizer_fingerprint=whole_optimizer(self._optimizer, self._model)[0],
            checks=dict(self._checks),
        )
        checkpoints.save(evidence)

    def _buffers_now(self) -> dict[str, tuple[torch.Tensor, int]]:
        return {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}

    def _note_written_buffers(self) -> None:
        before, self._buffers = self._buffers, self._buffers_now()
        for name, (buffer, version) in self._buffers.items():
            if name not in before or before[name][0] is not buffer or before[name][1] != version:
                self._written.add(name)

    def _leave_out_local(self, table: Mapping[str, str]) -> dict[str, str]:
        """Without the buffers that follow each rank's batches: written to on every rank, and different. Collective.

        A buffer that differs and that no pass wrote to was damaged: it stays, so that no resume accepts it.
        """
        rows = self._members.cpu_group.gather_rows({name: table[name] for name in self._written & table.keys()})
        common = set.intersection(*(set(row) for row in rows))
        local = {name for name in common if len({row[name] for row in rows}) > 1}
        return {name: value for name, value in table.items() if name not in local}

    def _compare(self, check: Check, step: Step, leaves: Mapping[str, torch.Tensor | str]) -> None:
        local = {name: _local(leaf) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}
        table, finding = fingerprint_tensors(local), None
        if not equal_words(table, self._replicas):
            finding = judge_difference(check, table, lambda: local, self._replicas, self._holders)
        # The ranks of other shards see nothing, and must raise the same alarm.
        if not self._members.cpu_group.any_true(finding is not None):
            self._checks[check] = step
            return
        speaks = finding is not None and self._replicas.rank == 0
        row = {"verdict": to_json(finding.verdict), "evidence": dict(finding.evidence)} if finding and speaks else {}
        found = [_ShardFinding.read(entry) for entry in self._members.cpu_group.gather_rows(row) if entry]
        verdict = _one_verdict([shard.verdict for shard in found], self._members.nodes)
        evidence = {**found[0].evidence, "differing_shards": len(found)}
        self._desk.raise_alarm(Finding(check=check, verdict=verdict, evidence=evidence), step, None)


@dataclass(frozen=True, kw_only=True)
class _ShardFinding:
    verdict: Verdict
    evidence: Mapping[str, Any]

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> _ShardFinding:
        return cls(verdict=from_json(Verdict, row["verdict"]), evidence=row["evidence"])


def _one_verdict(verdicts: Sequence[Verdict], nodes: Mapping[Rank, NodeName]) -> Verdict:
    """Of all shards that differ. Conclusive only where every one of them is, and all name ranks of one node."""
    if len(verdicts) == 1:
        return verdicts[0]
    suspects = tuple(sorted({rank for verdict in verdicts for rank in verdict.suspects}))
    open_ones = [verdict for verdict in verdicts if verdict.kind is not VerdictKind.CONCLUSIVE]
    conclusive = not open_ones and len({nodes[rank] for rank in suspects}) == 1
    return Verdict(
        kind=VerdictKind.CONCLUSIVE if conclusive else VerdictKind.AMBIGUOUS,
        rule="several_shards",
        suspects=suspects,
        witnesses=tuple(sorted({rank for verdict in verdicts for rank in verdict.witnesses} - set(suspects))),
        reason=f"{len(verdicts)} shards differ between replicas; the first: {verdicts[0].reason}",
        settle="" if conclusive else (open_ones or verdicts)[0].settle,
    )


def _replicate_dimension(model: nn.Module) -> tuple[DeviceMesh, int]:
    """The mesh, and the dimension along which every parameter is held more than once."""
    parameters = dict(model.named_parameters())
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if whole or not parameters:
        raise ShardingError(
            f"not sharded by fully_shard: {', '.join(whole[:4]) or 'a model without parameters'}; call fully_shard on "
            "the whole model first, and for DistributedDataParallel use truestep.attach"
        )
    sharded = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor)]
    mesh = sharded[0].device_mesh
    if any(parameter.device_mesh != mesh for parameter in sharded):
        raise ShardingError("the parameters lie on different meshes; shard the whole model over one mesh")
    if mesh.size() != dist.get_world_size():
        raise ShardingError(
            f"the model's mesh has {mesh.size()} of the job's {dist.get_world_size()} ranks; a comparison needs all of "
            "them on it"
        )
    for dimension in range(mesh.ndim):
        if mesh.size(dimension) > 1 and all(p.placements[dimension].is_replicate() for p in sharded):
            return mesh, dimension
    raise ShardingError(
        f"plain sharding over a mesh of {tuple(mesh.shape)} holds every shard once, so there is no copy to compare it "
        "with: shard within groups of ranks and replicate across them, fully_shard(model, mesh=init_device_mesh("
        'device, (replicas, shards), mesh_dim_names=("replicate", "shard")))'
    )


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise ShardingError("torch.distributed is not initialised; call init_process_group first")
    return world


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
