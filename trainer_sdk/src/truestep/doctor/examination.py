"""The examination as a whole: the same observations on every rank, and no trace of it in the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from truestep import rng
from truestep.attachment import Attachment
from truestep.checks.determinism import DeterministicKernels
from truestep.checks.recording import copy_buffers
from truestep.checks.ring_replay import AuditSetupError, RingReplayAudit
from truestep.checks.topology import Ring, TopologyError
from truestep.contract import Rank, Step
from truestep.doctor.diagnosis import Diagnosis, Level, Observation
from truestep.doctor.environment import examine_environment, examine_modules
from truestep.doctor.rebuilding import examine_rebuilding
from truestep.doctor.repeating import Probe, examine_kernels, examine_loss
from truestep.replay import ComputeLoss, PassInputs, RebuildBatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """What is to be trained, as `truestep.Guard` would get it."""

    ddp_model: DistributedDataParallel
    compute_loss: ComputeLoss
    batch: Any = None
    """This rank's micro-batch of `step`; None: `rebuild_batch` gives it."""
    rebuild_batch: RebuildBatch | None = None
    step: int = 0


def examine(
    attachment: Attachment,
    examined: Examined,
    *,
    deterministic: bool = True,
    to_give: str = "Examined(batch=...), or Examined(rebuild_batch=...)",
) -> Diagnosis:
    """Find out whether audits of this run can work. Collective: every rank, between two steps.

    Weights, gradients, buffers, random numbers and kernel modes are afterwards as before. Costs about six forwards and
    backwards, more where something is found, because then the operation is looked for.
    deterministic: as `Schedule.deterministic_audits`. to_give: what a caller who gave no batch has to give.
    """
    found = examine_environment(attachment) + examine_modules(examined.ddp_model)
    try:
        ring = Ring(attachment.nodes)
    except TopologyError as error:
        found.append(Observation(subject="nodes", level=Level.REFUSED, message=str(error)))
        return Diagnosis(observations=tuple(found))
    with _audit_conditions(deterministic):
        found += _examine_passes(attachment, examined, to_give)
        if examined.rebuild_batch is not None:
            found += examine_rebuilding(attachment, ring, examined.rebuild_batch, examined.batch, Step(examined.step))
    return Diagnosis(observations=tuple(found))


def prove(attachment: Attachment, examined: Examined, audit: RingReplayAudit, *, deterministic: bool) -> None:
    """The preflight: examine once an attempt, say what was found once, and downgrade the audit where it must be.

    Collective. Raises `AuditSetupError` on every rank where audits cannot work.
    """
    known = attachment.diagnosis
    to_give = "one to start_step(step, batch), or rebuild_batch to the guard"
    diagnosis = known or examine(attachment, examined, deterministic=deterministic, to_give=to_give)
    attachment.diagnosis = diagnosis
    if known is None and attachment.rank == 0:
        for observation in diagnosis.observations:
            level = logging.INFO if observation.level is Level.NOTE else logging.WARNING
            _log.log(level, "preflight, %s: %s", observation.subject, observation.message)
        _log.info("preflight: audits cover %s", diagnosis.coverage)
    refused = diagnosis.at(Level.REFUSED)
    if refused:
        raise AuditSetupError("; ".join(f"{o.subject}: {o.message}" for o in refused))
    if diagnosis.loses_gradients:
        audit.compare_losses_only()


def _examine_passes(attachment: Attachment, examined: Examined, to_give: str) -> list[Observation]:
    inputs = _own_inputs(attachment, examined)
    missing = attachment.cpu_group.any_true(inputs is None)
    if inputs is None or missing:
        message = f"there is no batch to try: give {to_give}"
        return [Observation(subject="loss", level=Level.REFUSED, message=message)]
    probe = Probe(examined.ddp_model.module, examined.compute_loss, attachment)
    found = examine_loss(probe, inputs)
    if found:
        return found
    shared = PassInputs.from_bytes(attachment.cpu_group.broadcast_bytes(inputs.to_bytes(), 0))
    return examine_kernels(probe, shared)


def _own_inputs(attachment: Attachment, examined: Examined) -> PassInputs | None:
    batch, own = examined.batch, rng.capture()
    if batch is None and examined.rebuild_batch is not None:
        try:
            batch = examined.rebuild_batch(Step(examined.step), Rank(attachment.rank))
        except Exception as error:
            _log.debug("rebuild_batch raised %s; its own examination reports it", error)
        finally:
            rng.restore(own)
    return None if batch is None else PassInputs(batch=batch, rng=own, buffers=copy_buffers(examined.ddp_model.module))


@contextmanager
def _audit_conditions(deterministic: bool) -> Iterator[None]:
    kernels = DeterministicKernels()
    if deterministic:
        kernels.switch_on()
    try:
        yield
    finally:
        kernels.switch_back()
