"""Whether the forward and backward give the same bits again, here and on every other node, and if not, which kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from truestep.attachment import Attachment
from truestep.contract import sha256_hex
from truestep.doctor.diagnosis import Level, Observation, Repeats, Steadiness, judge_repeats
from truestep.doctor.tracing import Operation, OperationTrace, first_difference, operation_of
from truestep.loss import LossError, require_scalar
from truestep.replay import ComputeLoss, PassInputs, PassResult, replay

RUNS = 3
"""Of the same pass on every rank: a kernel whose order of summation varies rarely gives the same bits three times."""


@dataclass(frozen=True)
class Probe:
    """The pass that is repeated."""

    module: nn.Module
    """The one inside DDP."""
    compute_loss: ComputeLoss
    attachment: Attachment

    def run(self, inputs: PassInputs) -> PassResult:
        """One replay; raises `LossError` for a loss that is no scalar."""
        return replay(self.module, inputs, lambda model, batch: require_scalar(self.compute_loss(model, batch)))

    def trace(self, inputs: PassInputs) -> list[Operation]:
        """The operations of one replay; empty where it cannot run under a trace."""
        try:
            with OperationTrace(self.module) as trace:
                self.run(inputs)
        except Exception:
            return []
        return trace.operations


def examine_loss(probe: Probe, inputs: PassInputs) -> list[Observation]:
    """Whether every rank's own pass runs alone, on one rank. Collective."""
    try:
        probe.run(inputs)
        complaint = ""
    except LossError as error:
        complaint = str(error)
    except Exception as error:
        complaint = f"compute_loss cannot run on one rank alone: {type(error).__name__}: {error}"[:600]
    for rank, row in enumerate(probe.attachment.cpu_group.gather_rows({"complaint": complaint})):
        if row["complaint"]:
            message = f"rank {rank}: {row['complaint']}"
            return [Observation(subject="loss", level=Level.REFUSED, message=message)]
    return []


def examine_kernels(probe: Probe, inputs: PassInputs) -> list[Observation]:
    """Runs the same pass several times on every rank and compares bits. Collective. inputs: the same on every rank."""
    cpu, nodes = probe.attachment.cpu_group, probe.attachment.nodes
    results = [probe.run(inputs) for _ in range(RUNS)]
    warnings = sorted({kernel for result in results for kernel in result.nondeterministic})
    rows = cpu.gather_rows(
        {
            "losses": [result.loss for result in results],
            "gradients": [sha256_hex({name: list(f) for name, f in r.gradients.items()})[:32] for r in results],
            "warnings": warnings[:8],
        }
    )
    losses = judge_repeats([row["losses"] for row in rows], nodes)
    gradients = judge_repeats([row["gradients"] for row in rows], nodes)
    warned = sorted({warning for row in rows for warning in row["warnings"]})
    verdict, forward = (losses, True) if losses.steadiness is not Steadiness.EQUAL else (gradients, False)
    if verdict.steadiness is Steadiness.EQUAL and not warned:
        return []
    culprit = _find_culprit(probe, inputs, results, verdict, warned)
    found = [] if verdict.steadiness is Steadiness.EQUAL else [_observe(probe, verdict, culprit, forward=forward)]
    if warned and not any(o.level in (Level.LOSS_ONLY, Level.REFUSED) for o in found):
        found.append(_observe_warning(warned[0], culprit))
    return found


def _observe(probe: Probe, verdict: Repeats, culprit: str, *, forward: bool) -> Observation:
    ranks = ", ".join(f"{rank} ({probe.attachment.nodes[rank]})" for rank in verdict.ranks[:4])
    where = f", first at {culprit}" if culprit else ""
    if verdict.steadiness is Steadiness.ONE_NODE:
        message = (
            f"rank {ranks} computes other bits than all other nodes for the same inputs{where}: its hardware is "
            "suspect, unless model or compute_loss do something else on this rank, by a number in a variable or in the "
            "environment; training starts, and the next audit judges it. Audit soon, and trust no checkpoint before "
            "that"
        )
        return Observation(subject="kernels", level=Level.SUSPECT, message=message)
    if verdict.steadiness is Steadiness.UNEQUAL:
        what = f"nodes compute different bits for the same inputs (rank {ranks} not what rank {verdict.reference} has)"
        advice = "use one instance type, image and thread count"
    else:
        what = f"the {'forward' if forward else 'backward'} does not repeat bit for bit on rank {ranks}"
        advice = (
            "replace that operation by a deterministic one, or let it draw from the global generators of torch, NumPy "
            "or Python, which audits restore"
        )
    if forward:
        message = f"{what}{where}: {advice}, or set Schedule(audit_every=None)"
        return Observation(subject="kernels", level=Level.REFUSED, message=message)
    message = f"{what}{where}: {advice}; until then audits compare losses only"
    return Observation(subject="kernels", level=Level.LOSS_ONLY, message=message)


def _observe_warning(warning: str, culprit: str) -> Observation:
    where = f" ({culprit})" if culprit else ""
    message = (
        f"{warning.split('. ')[0]}{where}: replace that operation by one with a deterministic kernel; until then "
        "audits compare losses only"
    )
    return Observation(subject="kernels", level=Level.LOSS_ONLY, message=message)


def _find_culprit(
    probe: Probe, inputs: PassInputs, results: Sequence[PassResult], verdict: Repeats, warned: Sequence[str]
) -> str:
    """Names the first operation that differs from itself, from the reference's, or that warned. Collective."""
    cpu = probe.attachment.cpu_group
    traces = [probe.trace(inputs) for _ in range(RUNS)]
    own = next((found for other in traces[1:] if (found := first_difference(traces[0], other))), None)
    mine = cpu.broadcast_bytes(_packed(traces[0]), int(verdict.reference))
    across = _first_unlike(mine, traces[0])
    warning = operation_of(warned[0], traces[0]) if warned else None
    rows: list[dict[str, Any]] = cpu.gather_rows(
        {
            "own": str(own or ""),
            "across": str(across or ""),
            "warning": str(warning or ""),
            "gradient": _differing_gradient(results),
        }
    )
    if verdict.steadiness is Steadiness.EQUAL:
        return next((row["warning"] for row in rows if row["warning"]), "")
    concerned = [rows[rank] for rank in verdict.ranks]
    for key in ("own", "across", "gradient"):
        for row in concerned:
            if row[key]:
                return str(row[key])
    return ""


def _differing_gradient(results: Sequence[PassResult]) -> str:
    first = results[0].gradients
    names = (name for result in results[1:] for name, value in result.gradients.items() if first.get(name) != value)
    name = next(names, "")
    return f"the gradient of {name}" if name else ""


def _packed(trace: Sequence[Operation]) -> bytes:
    return "\n".join(sha256_hex([operation.kernel, operation.digest])[:16] for operation in trace).encode()


def _first_unlike(reference: bytes, trace: Sequence[Operation]) -> Operation | None:
    digests = reference.decode().split("\n")
    return next(
        (
            operation
            for operation, digest in zip(trace, digests, strict=False)
            if sha256_hex([operation.kernel, operation.digest])[:16] != digest
        ),
        None,
    )
