"""What users of other tools reported on public trackers, done to truestep. All cases run in one group of three ranks.

Every function is one case: it runs on every rank and returns plain JSON. The numbers are those of the reports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import truestep
from truestep.attachment import BannedGpuError
from truestep.contract import Alarm, ResumeDirective, Step, TruestepError, to_json
from truestep.fingerprint import fingerprint_model
from truestep.inject import Fault, arm
from truestep.report.hold import bury

FAULTY, WORLD = 1, 3
SCHEDULE = truestep.Schedule(audit_every=2, check_every=2)


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


class Job:
    """A small model, from its start or its restart on."""

    def __init__(self, rank: int, *, hook: Any = None, seed: int = 7, **ddp: Any) -> None:
        self.rank = rank
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
        self.ddp = DistributedDataParallel(model, **ddp)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.attachment = truestep.attach(self.ddp, comm_hook=hook)
        torch.manual_seed(100 + rank)
        self.checkpoints: truestep.VerifiedCheckpoints | None = None
        self.start = 0
        self.trained: list[int] = []

    def resume(self, root: str) -> Job:
        """Keep checkpoints below `root`, and go on from there."""
        self.checkpoints = truestep.VerifiedCheckpoints(root, self.attachment, self.ddp, self.optimizer)
        self.start = truestep.resume(self.attachment, self.checkpoints).start_step
        return self

    def train(
        self, steps: int, *, batches: Callable[[int, int], Tensor] = batch_of, loss: Any = loss_of
    ) -> Alarm | None:
        """Up to step number `steps`."""

        def own() -> Iterator[Tensor]:
            for step in range(self.start, steps):
                yield batches(step, self.rank)

        return truestep.train(
            self.ddp,
            self.attachment,
            self.optimizer,
            own(),
            loss,
            batches,
            self.checkpoints,
            SCHEDULE,
            start_step=self.start,
            on_step=lambda step, _loss: self.trained.append(step),
        )

    @property
    def weights(self) -> str:
        """Fingerprint of all of them."""
        return fingerprint_model(self.ddp)[0]


def _told(alarm: Alarm | None, **more: Any) -> dict[str, Any]:
    return {"alarm": None if alarm is None else alarm.to_json(), **more}


def _root(name: str) -> str:
    return (Path(os.environ["TRUESTEP_OUTBOX_DIR"]).parent / name).as_uri()


def restart_on_the_bad_gpu(rank: int) -> dict[str, Any]:
    """Megatron-LM #5281: 44 restarts on the same bad GPU, over a corrupt checkpoint."""
    root = _root("restarts")
    job = Job(rank).resume(root)
    if rank == FAULTY:
        arm(job.ddp, job.optimizer, Fault(site="module_output", target="3", bit=20, first_step=4))
    alarm = job.train(12)
    assert alarm is not None
    if rank == 0:
        bury(alarm, root)
    dist.barrier()
    refusals = []
    for _ in range(2):
        try:
            Job(rank).resume(root)
        except TruestepError as error:
            refusals.append(str(error))
    directive = ResumeDirective(
        incident_id="incident-1",
        checkpoint_uri=f"{root}/step-00000003",
        manifest_sha256="0" * 64,
        max_step=Step(3),
        banned_gpu_uuids=(job.attachment.identities[FAULTY].gpu_uuid,),
        answers_alarm_ids=(alarm.alarm_id,),
    )
    path = Path(os.environ["TRUESTEP_DIRECTIVE"])
    if rank == 0:
        path.write_text(json.dumps(to_json(directive)))
    dist.barrier()
    try:
        Job(rank)
    except BannedGpuError as error:
        refusals.append(str(error))
    dist.barrier()
    path.unlink(missing_ok=True)
    return _told(alarm, refusals=refusals)


def checkpoint_in_the_middle_of_a_rerun(rank: int) -> dict[str, Any]:
    """Megatron-LM #3884: resuming crashed where the checkpoint was saved while a step was run again."""
    whole = Job(rank)
    assert whole.train(8) is None
    first = Job(rank).resume(_root("rerun"))
    assert first.train(4) is None  # step 3 is audited and saved
    second = Job(rank).resume(_root("rerun"))
    alarm = second.train(8)
    return _told(alarm, start=second.start, weights=second.weights, uninterrupted=whole.weights)


def nan_of_one_ranks_data_after_a_resume(rank: int) -> dict[str, Any]:
    """Megatron-LM #5026: a NaN on one rank, reproducible, after a resume; hardware must not be evicted.

    And NVRx #411, Megatron-Bridge #539: whether to stop or to go on is the caller's: here it skips the batch.
    """

    def poisoned(step: int, owner: int) -> Tensor:
        batch = batch_of(step, owner)
        return batch * float("inf") if (step, owner) == (5, FAULTY) else batch

    root = _root("poisoned")
    assert Job(rank).resume(root).train(4) is None
    job = Job(rank).resume(root)
    alarm = job.train(8, batches=poisoned)
    again = Job(rank).resume(root)
    return _told(alarm, start=job.start, second_alarm=_told(again.train(8))["alarm"], trained=again.trained)


def nan_only_with_data_parallelism(rank: int) -> dict[str, Any]:
    """Megatron-LM #2301: every rank's own gradient is finite, the reduced one is not."""
    job = Job(rank, hook=(None, fp16_compress_hook))
    return _told(job.train(4, loss=lambda model, batch: loss_of(model, batch) * 1e7))


def one_errant_gpu_makes_nans(rank: int) -> dict[str, Any]:
    """torchtitan #914: one GPU's NaNs went on for a weekend."""
    job = Job(rank)
    armed = None
    if rank == FAULTY:
        armed = arm(job.ddp, job.optimizer, Fault(site="module_output", target="0", model="nan", first_step=2))
    alarm = job.train(8)
    finite = all(bool(parameter.isfinite().all()) for parameter in job.ddp.parameters())
    return _told(alarm, fired=armed is None or armed.firings > 0, trained=job.trained, finite=finite)


def nan_in_receive_buffers(rank: int) -> dict[str, Any]:
    """pytorch #134062: a NaN check that fires on buffers before anything was received into them."""
    torch.use_deterministic_algorithms(True)  # fills every new tensor with NaN
    try:
        return _told(Job(rank).train(6), filled=bool(torch.empty(3).isnan().all()))
    finally:
        torch.use_deterministic_algorithms(False)


def _own_loop(job: Job, steps: int, scaler: torch.amp.GradScaler, *, unaveraged: int | None = None) -> Alarm | None:
    guard = truestep.Guard(
        job.ddp, job.optimizer, SCHEDULE, compute_loss=loss_of, rebuild_batch=batch_of, grad_scaler=scaler
    )
    try:
        for step in range(steps):
            job.optimizer.zero_grad(set_to_none=True)
            batch = batch_of(step, job.rank)
            guard.start_step(step, batch)
            with job.ddp.no_sync() if step == unaveraged else nullcontext():
                loss = loss_of(job.ddp, batch)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(job.optimizer)
            guard.before_update(loss)
            scaler.step(job.optimizer)
            scaler.update()
            guard.after_update()
            job.trained.append(step)
    except truestep.CorruptionDetected as detected:
        return detected.alarm
    return None


def unequal_grad_scaler_scales(rank: int) -> dict[str, Any]:
    """pytorch #136009: ranks with different scales drift apart."""
    job = Job(rank)
    return _told(_own_loop(job, 4, torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + (rank == FAULTY)))))


def skipped_step_skips_averaging(rank: int) -> dict[str, Any]:
    """pytorch #76282: a step whose averaging was left out, under a loss scaler."""
    job = Job(rank)
    alarm = _own_loop(job, 6, torch.amp.GradScaler("cpu", init_scale=2.0**8), unaveraged=2)
    return _told(alarm, trained=job.trained)


def replicas_start_differently(rank: int) -> dict[str, Any]:
    """OLMo-core #319: replicas were initialised differently, and nobody noticed."""
    return _told(Job(rank, seed=rank, init_sync=False).train(6))


def a_replicated_parameter_drifts(rank: int) -> dict[str, Any]:
    """pytorch #160169: a copy of a replicated parameter moves away, in its lowest bit at first."""
    job = Job(rank)
    if rank == FAULTY:
        arm(job.ddp, job.optimizer, Fault(site="weight", target="3.weight", element=5, bit=0, first_step=2))
    alarm = job.train(8)
    return _told(alarm, trained=job.trained)


def one_nodes_all_reduce_differs(rank: int) -> dict[str, Any]:
    """nccl #434: what one node receives is always a little different."""

    def hook(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        def received(future: torch.futures.Future[Tensor]) -> Tensor:
            buffer = future.value()
            if rank == FAULTY:
                buffer.view(torch.int32)[3] ^= 1
            return buffer

        return allreduce_hook(None, bucket).then(received)  # type: ignore[arg-type]

    job = Job(rank, hook=(None, hook))
    return _told(job.train(4), trained=job.trained)


def last_elements_are_not_reduced(rank: int) -> dict[str, Any]:
    """nccl #1950: the last 8 elements of a buffer keep every rank's own values."""

    def hook(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        own = bucket.buffer()[-8:].clone()

        def received(future: torch.futures.Future[Tensor]) -> Tensor:
            buffer = future.value()
            buffer[-8:] = own
            return buffer

        return allreduce_hook(None, bucket).then(received)  # type: ignore[arg-type]

    job = Job(rank, hook=(None, hook))
    return _told(job.train(4), trained=job.trained)


CASES = (
    restart_on_the_bad_gpu,
    checkpoint_in_the_middle_of_a_rerun,
    nan_of_one_ranks_data_after_a_resume,
    nan_only_with_data_parallelism,
    one_errant_gpu_makes_nans,
    nan_in_receive_buffers,
    unequal_grad_scaler_scales,
    skipped_step_skips_averaging,
    replicas_start_differently,
    a_replicated_parameter_drifts,
    one_nodes_all_reduce_differs,
    last_elements_are_not_reduced,
)


def all_cases(rank: int) -> dict[str, Any]:
    """Name -> what the case returned."""
    return {case.__name__: case(rank) for case in CASES}
