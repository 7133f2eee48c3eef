"""What a training loop calls around each step. Order of the checks in docs/architecture.md.

    guard.start_step(step, batch)
    loss = compute_loss(ddp_model, batch); loss.backward()
    guard.before_update(loss)     # non-finite, reduction, audit
    optimizer.step()
    guard.after_update()          # weights, optimizer state, checkpoint

Both raise `CorruptionDetected` on every rank or on none. Once it was raised, the guard raises it again at every call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import Attachment, attachment_of
from truestep.audit_steps import ScheduleError
from truestep.bundle.settings import BundleSettings
from truestep.bundle.writing import EvidenceBundles
from truestep.checks.alarms import NO_AUDITS, AlarmDesk, CorruptionDetected
from truestep.checks.audit_setup import audit_of, ring_of
from truestep.checks.buckets import StepGradients
from truestep.checks.constant_buffers import ConstantBuffers
from truestep.checks.copies import TrainingCopies
from truestep.checks.determinism import DeterministicKernels
from truestep.checks.finding import Finding
from truestep.checks.local_buffers import LocalBuffers
from truestep.checks.nonfinite import confirm_nonfinite
from truestep.checks.recording import PassRecording
from truestep.checks.reduction import ReductionWatch, judge_reduction
from truestep.checks.ring_replay import AuditSetupError, RingReplayAudit
from truestep.checks.update_replay import UpdateReplay
from truestep.contract import Check, Step
from truestep.doctor.examination import Examined, prove
from truestep.judge import judge_unequal_reduction, judge_unequal_scales
from truestep.loss import require_scalar
from truestep.metrics import counted
from truestep.protocols import SaveEvidence
from truestep.replay import ComputeLoss, RebuildBatch
from truestep.report.start import announce_start
from truestep.saving import CheckpointSaves, SaveCheckpoint
from truestep.schedule import Schedule
from truestep.warm_up import warm_up

__all__ = ["CorruptionDetected", "Guard"]

_BUNDLES = BundleSettings()


class _Stage(Enum):
    """How far the guard has come in a step."""

    BETWEEN_STEPS = auto()
    BEGUN = auto()
    JUDGED = auto()


class Guard:
    """Runs the checks of one model. Every method is called by every rank, at the same step."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        attachment: Attachment | None = None,
        compute_loss: ComputeLoss | None = None,
        rebuild_batch: RebuildBatch | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        checkpoints: SaveCheckpoint | None = None,
        preflight: bool = False,
        bundles: BundleSettings | None = _BUNDLES,
    ) -> None:
        """attachment: default, what `attach` made for this model.

        compute_loss(model, batch): scalar loss, including autocast; what audits replay. Needed where the schedule has
        audits. rebuild_batch(step, rank): any rank's micro-batch; optional where `start_step` gets the batch, and then
        a spot check.
        preflight: prove in front of the first step that audits can work (docs/doctor.md); once an attempt.
        checkpoints: a `CheckpointStore`, or `callable(step)`, called only after weights and optimizer state were
        compared.
        bundles: how an audit's alarm keeps what `truestep confirm` runs again; None keeps nothing.
        Raises `AuditSetupError` or `TopologyError` where audits cannot work in this run.
        """
        self._model = ddp_model
        self._optimizer = optimizer
        self._schedule = schedule
        self._attachment = attachment or attachment_of(ddp_model)
        self._compute_loss = compute_loss
        self._rebuild_batch = rebuild_batch
        self._scaler = grad_scaler
        self._saves = CheckpointSaves(self._attachment, checkpoints)
        self._preflight = preflight
        self._bundles = bundles
        self._kernels = DeterministicKernels()
        writer = EvidenceBundles(self._attachment, ddp_model.module, compute_loss, bundles, self._saves.store)
        self._desk = AlarmDesk(self._attachment, self._saves.store, self._coverage, writer)
        self._ring = ring_of(self._attachment.nodes, schedule)
        self._audit = audit_of(self._attachment, ddp_model.module, self._ring, schedule, compute_loss, rebuild_batch)
        names = {id(parameter): name for name, parameter in ddp_model.module.named_parameters()}
        self._updates = UpdateReplay(self._attachment, optimizer, self._ring, names) if self._ring else None
        self._checks: dict[str, int] = {}
        self._clean_through: Step | None = None
        self._step = Step(0)
        self._recording: PassRecording | None = None
        self._reduction: ReductionWatch | None = None
        self._local_buffers = LocalBuffers()
        self._copies = TrainingCopies(self._attachment, ddp_model.module, optimizer, self._local_buffers)
        self._constants = ConstantBuffers(self._attachment, ddp_model, self._local_buffers)
        self._awaited_micro_batch: int | None = None
        self._stage = _Stage.BETWEEN_STEPS
        self._audit_passed = False
        announce_start(self._attachment.rank, self._attachment.nodes, schedule, self._coverage())

    @property
    def clean_through(self) -> Step | None:
        """Newest step at which every check that sees computation faults passed on every rank; None before one did."""
        return self._clean_through

    @property
    def checks(self) -> dict[str, int]:
        """Check name -> newest step at which it passed on every rank."""
        return dict(self._checks)

    def warm_up(self, batch: Any) -> None:
        """One discarded pass after a resume, before the first step (docs/adr/0001). Collective, needs `compute_loss`"""
        if self._compute_loss is None:
            raise AuditSetupError("warm_up needs compute_loss; give it to the guard")
        with self._attachment.sensor.without_user_hook():
            warm_up(self._model, batch, self._compute_loss)
        self._attachment.sensor.take()

    def start_step(self, step: int, batch: Any = None, *, micro_batches: int = 1) -> None:
        """Begin a step; nothing may draw random numbers between this call and the loss.

        Raises `PeerFailedError`, here and in both `*_update` calls, once another rank failed in code of the user's.

        batch: this rank's, as `compute_loss` gets it; None: `rebuild_batch` gives it where it is needed.
        micro_batches: above 1, wrap each one's pass in `micro_batch`, and pass no batch here. 0: nobody knows yet.
        """
        self._desk.raise_again()
        self.leave_step()
        self._step = self._attachment.current_step = Step(step)
        self._attachment.peers.open_step(self._step)
        self._audit_passed, self._stage = False, _Stage.BEGUN
        self._watch_reduction()
        if micro_batches == 1:
            self._prove(batch)
        audited = self._schedule.audits(self._step)
        if audited and self._schedule.deterministic_audits:
            self._kernels.switch_on()
        if audited and self._updates is not None:
            self._updates.watch(self._step)
        if micro_batches == 1:
            self._awaited_micro_batch = None
            self._record(batch)
        else:
            # The audited micro-batch rotates through the accumulation window.
            number = self._schedule.audit_number(self._step) if audited else step
            self._awaited_micro_batch = number % max(1, micro_batches)

    @contextmanager
    def micro_batch(self, index: int, batch: Any) -> Iterator[Callable[[torch.Tensor], None]]:
        """Around forward and backward of micro-batch `index` (0-based) of the step; call what it yields with the loss.

        The loss is what `compute_loss` returns for this micro-batch: divide by the number of micro-batches inside it.
        """
        losses: list[torch.Tensor] = []
        self._prove(batch)
        if index == self._awaited_micro_batch:
            self._record(batch)
        yield losses.append
        if index == self._awaited_micro_batch and self._recording is not None:
            self._recording.finish(losses[-1] if losses else None)

    def leave_step(self) -> None:
        """Leave out what is left of the step: a batch that every rank skips. Nothing of it stays, neither hooks nor
        kernel modes. `start_step` calls it; call it yourself where a skipped step is the last. No collective, no
        synchronisation.
        """
        if self._stage is _Stage.BETWEEN_STEPS:
            return
        self._stage = _Stage.BETWEEN_STEPS
        # What a skipped backward left must not be judged with the next one's.
        self._attachment.sensor.forget()
        if self._updates is not None:
            self._updates.forget()
        self._let_go()

    @counted("_attachment.counters", last=False)
    def before_update(self, loss: torch.Tensor | None = None) -> None:
        """Between the backward and the update. loss: unscaled; without it an audit compares gradients only.

        Raises `CorruptionDetected` (on every rank or on none) after the alarm was written and sent: drop the update.
        """
        self._desk.raise_again()
        if loss is not None:
            require_scalar(loss)
        recording = self._recording
        if recording is None:
            raise ValueError(
                "before_update without a recorded pass: call start_step(step, batch) before the forward, or with the "
                "step's real number of micro_batches"
            )
        try:
            recording.finish(loss)
            finding = self._judge_gradients(self._attachment.sensor.take(), recording)
            audited = self._schedule.audits(self._step) and self._local_buffers.repeatable(self._step)
            if finding is None and self._audit is not None and audited:
                finding = self._run_audit(self._audit, recording)
        finally:
            self._let_go()
            self._attachment.peers.close_step()
        if finding is not None:
            self.leave_step()
            self._desk.raise_alarm(finding, self._step, self._clean_through)
        self._stage = _Stage.JUDGED

    @counted("_attachment.counters", last=True)
    def after_update(self) -> None:
        """After the update: compares copies where they are due, then saves where a checkpoint is due.

        Raises `CorruptionDetected` (on every rank or on none) after the alarm was written and sent; nothing was saved
        then.
        """
        self._desk.raise_again()
        if self._stage is not _Stage.JUDGED:
            raise ValueError(
                f"after_update without before_update: nobody has judged the gradients of step {self._step}. Call "
                "before_update(loss) between the backward and optimizer.step()"
            )
        self._stage = _Stage.BETWEEN_STEPS
        saving = self._saves.wanted and self._schedule.saves(self._step)
        compared = self._compare(saving=saving) if saving or self._schedule.compares_weights(self._step) else None
        if self._schedule.audits(self._step):
            self._replay_update()
        if self._audit_passed:
            self._clean_through = self._step
        if saving and compared is not None:
            self._saves.save(self._step, compared)
        if self._audit_passed:
            self._saves.settle_trust(self._step)

    def _let_go(self) -> None:
        if self._recording is not None:
            self._recording.abandon()
        self._recording = self._attachment.sensor.watch = self._reduction = None
        self._kernels.switch_back()

    def _watch_reduction(self) -> None:
        own, due = self._attachment, self._schedule.checks_reduction(self._step)
        watch = ReductionWatch(self._step, own.rank, own.world_size, own.sensor.user_hook) if due else None
        own.sensor.watch = self._reduction = watch

    def _record(self, batch: Any) -> None:
        if self._audit is not None:
            self._audit.examine(batch)
        replayable = self._compute_loss is not None and self._ring is not None
        schedule, saving = self._schedule, self._saves.wanted and self._schedule.saves(self._step)
        self._recording = PassRecording(
            self._model.module,
            batch if replayable else None,
            audited=self._audit is not None and schedule.audits(self._step),
            compared=saving or schedule.compares_weights(self._step) or schedule.audits(self._step),
            loss_scale=self._scale,
            one_of_several=self._awaited_micro_batch is not None,
        )

    def _prove(self, batch: Any) -> None:
        """The preflight, before the first pass; afterwards nothing."""
        wanted, self._preflight = self._preflight, False
        if wanted and self._audit is not None and self._compute_loss is not None:
            examined = Examined(self._model, self._compute_loss, batch, self._rebuild_batch, self._step)
            prove(self._attachment, examined, self._audit, deterministic=self._schedule.deterministic_audits)

    def _coverage(self) -> str:
        return self._audit.coverage if self._audit is not None else NO_AUDITS

    def _due(self) -> int:
        """All that decides which collectives this step enters."""
        flags = [self._saves.wanted, self._compute_loss is not None, self._bundles is not None]
        flags += [self._schedule.deterministic_audits]
        return self._schedule.due(self._step) << len(flags) | sum(flag << i for i, flag in enumerate(flags))

    def _judge_gradients(self, seen: StepGradients, recording: PassRecording) -> Finding | None:
        """One small all-reduce a step, so that every rank takes the same branch."""
        scale_bits = struct.unpack("<q", struct.pack("<d", self._scale))[0]
        due, news = self._due(), self._local_buffers.note(recording.written_buffers, recording.made_buffers)
        flags = bool(seen.local_nonfinite), bool(seen.reduced_nonfinite)
        observed = (due, news, *flags, self._constants.word(), seen.reduced_word, scale_bits)
        extremes = self._attachment.cpu_group.extremes([int(value) for value in observed])
        (low_due, high_due), (_, any_news), (_, local), (_, reduced), *others = extremes
        (low_constants, high_constants), (low_word, high_word), (low_scale, high_scale) = others
        if low_due != high_due:
            raise ScheduleError(
                f"the ranks disagree on the checks of step {self._step}; give every rank the same Schedule, with an "
                "audit_every that depends on the step alone, and every rank's Guard the same checkpoints, compute_loss "
                "and bundles"
            )
        if any_news:
            self._local_buffers.agree(self._attachment.cpu_group, self._model.module)
        if low_constants != high_constants:
            # Before anything that the step computed: every rank's forward had rank 0's copy.
            finding = self._constants.judge()
            if finding is not None:
                return finding
        if low_scale != high_scale:
            return Finding(check=Check.NONFINITE, verdict=judge_unequal_scales(self._step))
        if (local or reduced) and not self._scale > 1.0:
            return confirm_nonfinite(
                self._step,
                seen,
                recording,
                attachment=self._attachment,
                module=self._model.module,
                ring=self._ring,
                compute_loss=self._compute_loss,
                rebuild_batch=self._rebuild_batch,
            )
        if low_word != high_word and not (local or reduced):
            return Finding(check=Check.REDUCTION, verdict=judge_unequal_reduction(self._step))
        if self._reduction is not None and not (local or reduced):
            finding = judge_reduction(self._reduction, self._step, self._attachment)
            if finding is not None:
                return finding
        self._checks[Check.NONFINITE] = self._checks[Check.REDUCTION] = self._step
        return None

    def _run_audit(self, audit: RingReplayAudit, recording: PassRecording) -> Finding | None:
        if recording.result is None:
            raise ValueError(
                "no micro-batch of this audited step was recorded: wrap each in guard.micro_batch(index, batch)"
            )
        table = self._copies.weights()
        if self._copies.own_parameters:
            raise AuditSetupError(
                f"DDP ignores {', '.join(sorted(self._copies.own_parameters)[:4])}, and each rank has its own: another "
                "rank cannot run this one's pass again; set audit_every=None"
            )
        number = self._schedule.audit_number(self._step)
        outcome = audit.run(self._step, number, recording, recording.result, table.word)
        if outcome.weights_differ:
            return self._copies.compare(Check.WEIGHTS, table)
        if outcome.passed:
            self._checks[Check.RING_REPLAY] = self._step
        self._audit_passed = outcome.passed and outcome.covers_gradients
        return outcome.finding

    def _replay_update(self) -> None:
        if self._updates is None or not self._updates.enabled:
            return
        passed, finding = self._updates.run(
            self._step, self._schedule.audit_number(self._step), self._copies.compare_all
        )
        self._raise_if(finding)
        if passed:
            self._checks[Check.UPDATE_REPLAY] = self._step

    def _compare(self, *, saving: bool) -> Callable[[], SaveEvidence]:
        """Compare the copies; raises the alarm of the first difference. Returns what makes the evidence of a save."""
        weights, state = self._copies.weights(), None
        self._raise_if(self._copies.compare(Check.WEIGHTS, weights))
        self._checks[Check.WEIGHTS] = self._step
        if saving:
            # A flipped low bit of a second moment leaves most weights equal for many steps, and rank 0 would save it.
            state = self._copies.optimizer_state()
            self._raise_if(self._copies.compare(Check.OPTIMIZER_STATE, state))
            self._checks[Check.OPTIMIZER_STATE] = self._step
        return lambda: SaveEvidence(
            step=self._step,
            weights_fingerprint=weights.combined,
            tensor_fingerprints=dict(weights),
            optimizer_fingerprint=state.combined if state is not None else "",
            checks={str(check): step for check, step in self._checks.items()},
            bucket_layout_sha256=self._attachment.sensor.layout_sha256,
        )

    def _raise_if(self, finding: Finding | None) -> None:
        if finding is not None:
            self._desk.raise_alarm(finding, self._step, self._clean_through)

    @property
    def _scale(self) -> float:
        """GradScaler's factor; above 1 an overflow is its way of searching and no alarm."""
        return float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else 1.0
