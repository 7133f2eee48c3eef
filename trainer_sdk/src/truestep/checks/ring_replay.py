"""The ring replay audit: every rank recomputes another node's micro-batch and compares bits. docs/architecture.md,
section 1.

Every rank enters the same collectives whatever happens to its own replay: one that raises becomes a row that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from truestep.attachment import Attachment
from truestep.bundle.failing import FailingPass, choose_pass
from truestep.bundle.modes import read_modes
from truestep.checks.batches import RebuildError, rebuilt, unfit_for_rebuilding
from truestep.checks.finding import SHOWN_NAMES, Finding
from truestep.checks.isolation import watch_compiler
from truestep.checks.recording import PassRecording
from truestep.checks.topology import Ring, arbitration_plan
from truestep.contract import Check, NodeName, Rank, Step, TruestepError, Verdict, sha256_hex
from truestep.fingerprint import fingerprint_nested
from truestep.judge import AuditEvidence, Recorded, Replayed, judge_audit, mismatching_edges
from truestep.replay import ComputeLoss, PassInputs, PassResult, RebuildBatch, replay

_log = logging.getLogger(__name__)

SHOWN_EDGES = 8


class AuditSetupError(TruestepError):
    """Audits cannot work in this run as it is set up; says what to change. Raised on every rank or on none."""


@dataclass(frozen=True, kw_only=True)
class AuditOutcome:
    """What an audit ended with; the same on every rank."""

    finding: Finding | None = None
    passed: bool = False
    """Every replay ran, on another device than the record, and everything compared was equal."""
    covers_gradients: bool = False
    """False for a loss-only audit, which never makes a checkpoint trusted."""
    weights_differ: bool = False
    """The audit did not start: the copies of the weights differ already."""


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """One replay on this rank."""

    replayed: Replayed
    result: PassResult | None
    data: bytes = b""
    """The inputs that it started from."""

    def row(self) -> dict[str, Any]:
        loss, gradients = _words(self.result)
        kernels = list(self.result.nondeterministic) if self.result else []
        return {**asdict(self.replayed), "loss": loss, "gradients": gradients, "kernels": kernels[:SHOWN_NAMES]}


class RingReplayAudit:
    """Runs audits for one model. Every method is collective."""

    def __init__(
        self,
        attachment: Attachment,
        module: nn.Module,
        ring: Ring,
        compute_loss: ComputeLoss,
        rebuild_batch: RebuildBatch | None,
        *,
        compare_gradients: bool,
    ) -> None:
        """module: the one inside DDP. compare_gradients: False makes every audit compare losses only.

        Raises `AuditSetupError` for a `rebuild_batch` that cannot be called as one.
        """
        unfit = unfit_for_rebuilding(rebuild_batch) if rebuild_batch is not None else ""
        if unfit:
            raise AuditSetupError(unfit)
        watch_compiler()
        self._attachment = attachment
        self._cpu = attachment.cpu_group
        self._module = module
        self._ring = ring
        self._compute_loss = compute_loss
        self._rebuild_batch = rebuild_batch
        self._gradients = compare_gradients
        self._use_loss = True
        self._examined = False
        if ring.alone:
            _log.warning(
                "one rank: audits compare its GPU with itself, so they never count as passed and no checkpoint becomes "
                "trusted; run at least two ranks, or set audit_every=None"
            )

    def examine(self, batch: Any) -> None:
        """Refuse a batch that ranks cannot compare, in front of the first pass; later ones are not looked at.

        Raises `AuditSetupError`.
        """
        if self._examined or batch is None:
            return
        self._examined = True
        try:
            fingerprint_nested(batch)
        except TypeError as error:
            raise AuditSetupError(str(error)) from error

    @property
    def coverage(self) -> str:
        """What audits compare, as an alarm says it."""
        return "loss and gradients" if self._gradients else "loss only: backward not covered"

    def compare_losses_only(self) -> None:
        """The backward is known not to repeat: leave gradients out. Called by every rank, or by none."""
        self._gradients = False

    def run(self, step: Step, number: int, recording: PassRecording, result: PassResult, weights: int) -> AuditOutcome:
        """Audit the recorded pass of `step`. number: of this audit, for the ring's rotation. weights: word of the
        fingerprints of everything that healthy replicas agree on.

        Raises `AuditSetupError` on every rank where no rank could replay anything, or nothing is left to compare.
        """
        with self._attachment.counters.audit():
            return self._run(step, number, recording, result, weights)

    def _run(self, step: Step, number: int, recording: PassRecording, result: PassResult, weights: int) -> AuditOutcome:
        inputs = self._own_inputs(step, recording)
        payload = inputs.to_bytes()
        own_inputs = inputs.fingerprint()
        # Collective 1: is there anything to compare on? Unequal weights are the weight comparison's to judge.
        loss, gradients = _words(result)
        before = self._cpu.gather_rows({"weights": weights, "inputs": own_inputs, "loss": loss, "gradients": gradients})
        if len({row["weights"] for row in before}) > 1:
            return AuditOutcome(weights_differ=True)
        producer = self._ring.producer(self._attachment.rank, number)
        shipped = self._cpu.exchange(self._ring.transfers(number), payload)
        attempt = self._attempt(Rank(producer), shipped[producer], step)
        rows = self._cpu.gather_rows(attempt.row())
        self._settle_coverage(before, rows)
        recorded = {
            Rank(rank): Recorded(
                rank=Rank(rank),
                node=NodeName(self._attachment.nodes[Rank(rank)]),
                inputs=row["inputs"],
                result=self._result(row),
            )
            for rank, row in enumerate(before)
        }
        ring = [self._replayed(row) for row in rows]
        self._refuse_if_nothing_ran(ring)
        edges = mismatching_edges(recorded, ring)
        evidence = AuditEvidence(recorded=recorded, ring=ring)
        attempts = {producer: attempt}
        if edges:
            evidence = self._arbitrate(evidence, edges, payload, shipped[producer], step, attempts)
        verdict = judge_audit(evidence)
        if verdict is None:
            passed = self._all_ran(ring, step) and not self._ring.alone
            return AuditOutcome(passed=passed, covers_gradients=self._gradients)
        document = self._evidence(evidence, edges, result, attempts)
        failing = self._failing(
            evidence, edges, verdict, _Attempt(replayed=ring[0], result=result, data=payload), attempts
        )
        return AuditOutcome(
            finding=Finding(check=Check.RING_REPLAY, verdict=verdict, evidence=document, failing=failing)
        )

    def _failing(
        self,
        evidence: AuditEvidence,
        edges: Sequence[Replayed],
        verdict: Verdict,
        record: _Attempt,
        attempts: dict[Rank, _Attempt],
    ) -> FailingPass | None:
        """What a bundle is made of. record: this rank's own recorded pass."""
        chosen = choose_pass(evidence, edges, verdict)
        if chosen is None:
            return None
        held = record if chosen.producer == self._attachment.rank else attempts.get(chosen.producer)
        return FailingPass(
            chosen=chosen,
            compares_loss=self._use_loss,
            compares_gradients=self._gradients,
            modes=read_modes(),
            own=held.result if held else None,
            payload=held.data if held else b"",
        )

    def _arbitrate(
        self,
        evidence: AuditEvidence,
        edges: Sequence[Replayed],
        payload: bytes,
        from_producer: bytes,
        step: Step,
        attempts: dict[Rank, _Attempt],
    ) -> AuditEvidence:
        """Third nodes replay every mismatching edge's micro-batch, and everyone who ran one runs it again."""
        me = self._attachment.rank
        plan = arbitration_plan(self._ring, edges)
        transfers = [(int(producer), int(arbiter)) for producer, arbiters in plan.items() for arbiter in arbiters]
        shipped = self._cpu.exchange(transfers, payload)
        mine = [self._attempt(Rank(source), data, step) for source, data in sorted(shipped.items())]
        attempts.update({attempt.replayed.producer: attempt for attempt in mine})
        again = dict(shipped)
        for edge in edges:
            if edge.producer == me:
                again[me] = payload
            if edge.replayer == me:
                again[edge.producer] = from_producer
        reruns = [self._attempt(Rank(source), data, step) for source, data in sorted(again.items())]
        rows = self._cpu.gather_rows({"arbitration": [a.row() for a in mine], "reruns": [a.row() for a in reruns]})
        return replace(
            evidence,
            arbitration=[self._replayed(entry) for row in rows for entry in row["arbitration"]],
            reruns=[self._replayed(entry) for row in rows for entry in row["reruns"]],
        )

    def _attempt(self, producer: Rank, data: bytes, step: Step) -> _Attempt:
        me = self._attachment.rank
        try:
            inputs = PassInputs.from_bytes(data)
            arrived, other = inputs.fingerprint(), ""
            if not self._rebuilds_equal(inputs, producer, step):
                other = f"rebuild_batch({step}, {producer}) gives another batch than the one trained on"
                arrived = sha256_hex([arrived, other])[:32]
            result = replay(self._module, inputs, self._compute_loss)
        except Exception as error:
            failed = (str(error) if isinstance(error, RebuildError) else f"{type(error).__name__}: {error}")[:500]
            return _Attempt(replayed=Replayed(producer=producer, replayer=me, failed=failed), result=None)
        replayed = Replayed(producer=producer, replayer=me, inputs=arrived, other_inputs=other)
        return _Attempt(replayed=replayed, result=result, data=data)

    def _rebuilds_equal(self, inputs: PassInputs, producer: Rank, step: Step) -> bool:
        if self._rebuild_batch is None:
            return True
        return fingerprint_nested(self._rebuilt(step, producer)) == fingerprint_nested(inputs.batch)

    def _rebuilt(self, step: Step, rank: Rank) -> Any:
        if self._rebuild_batch is None:
            raise AuditSetupError(
                "this step's batch is not known: pass it to start_step(step, batch), or give the guard rebuild_batch"
            )
        return rebuilt(self._rebuild_batch, step, rank)

    def _own_inputs(self, step: Step, recording: PassRecording) -> PassInputs:
        batch = None if recording.has_batch else self._rebuilt(step, self._attachment.rank)
        return recording.inputs(batch)

    def _settle_coverage(self, before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
        """What can be compared, decided on rows that every rank has."""
        self._use_loss = all(row["loss"] for row in before)
        kernels = sorted({kernel for row in rows for kernel in row["kernels"]})
        if kernels and self._gradients:
            self._gradients = False
            if self._attachment.rank == 0:
                _log.warning(
                    "audits compare losses only from now on (backward not covered, no checkpoint becomes trusted): %s",
                    kernels[0],
                )
        if not self._gradients and not self._use_loss:
            raise AuditSetupError(
                "a loss-only audit needs the loss: pass it to before_update(loss), or set "
                "Schedule(deterministic_audits=True)"
            )

    def _refuse_if_nothing_ran(self, ring: Sequence[Replayed]) -> None:
        if all(replayed.failed for replayed in ring):
            failed = ring[0].failed
            advice = "" if "rebuild_batch(" in failed else "; compute_loss(model, batch) must run on one rank alone"
            raise AuditSetupError(
                f"no rank could replay a micro-batch, so audits cannot work in this run: {failed}{advice}"
            )

    def _all_ran(self, ring: Sequence[Replayed], step: Step) -> bool:
        failed = [replayed for replayed in ring if replayed.failed]
        if failed and self._attachment.rank == 0:
            _log.error(
                "audit of step %d is incomplete and does not count: %d of %d replays failed, first on rank %d: %s",
                step,
                len(failed),
                len(ring),
                failed[0].replayer,
                failed[0].failed,
            )
        return not failed

    def _result(self, row: dict[str, Any]) -> str:
        return sha256_hex([row["loss"] if self._use_loss else "", row["gradients"] if self._gradients else ""])[:32]

    def _replayed(self, row: dict[str, Any]) -> Replayed:
        return Replayed(
            producer=Rank(row["producer"]),
            replayer=Rank(row["replayer"]),
            inputs=row["inputs"],
            other_inputs=row["other_inputs"],
            result="" if row["failed"] else self._result(row),
            failed=row["failed"],
        )

    def _evidence(
        self, evidence: AuditEvidence, edges: Sequence[Replayed], result: PassResult, attempts: dict[Rank, _Attempt]
    ) -> dict[str, Any]:
        """What the alarm carries. Collective: parties of the shown edges contribute their gradient tables."""
        me = self._attachment.rank
        tables: dict[str, Any] = {}
        for edge in edges[:SHOWN_EDGES]:
            ran = (
                result if edge.producer == me else attempts[edge.producer].result if edge.producer in attempts else None
            )
            if ran is not None:
                tables[str(edge.producer)] = {"loss": ran.loss_value, "gradients": _digests(ran)}
        rows = self._cpu.gather_rows(tables)
        return {
            "edges": [self._edge_evidence(edge, evidence, rows) for edge in edges[:SHOWN_EDGES]],
            "mismatching_edges": len(edges),
            "failed_replays": [asdict(r) for r in (*evidence.ring, *evidence.arbitration) if r.failed][:SHOWN_EDGES],
            "inputs": [
                asdict(r) for r in evidence.ring if not r.failed and r.inputs != evidence.recorded[r.producer].inputs
            ][:SHOWN_EDGES],
        }

    def _edge_evidence(self, edge: Replayed, evidence: AuditEvidence, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        key = str(edge.producer)
        record, other = rows[edge.producer].get(key, {}), rows[edge.replayer].get(key, {})
        ours, theirs = record.get("gradients", {}), other.get("gradients", {})
        differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        truth = evidence.recorded[edge.producer].result
        return {
            "producer": edge.producer,
            "replayer": edge.replayer,
            "losses": {str(rank): row[key]["loss"] for rank, row in enumerate(rows) if key in row},
            "differing_gradients": len(differing),
            "differing_gradient_names": differing[:SHOWN_NAMES],
            "arbiters": [
                {
                    "rank": r.replayer,
                    "agrees_with": "producer"
                    if r.result == truth
                    else "replayer"
                    if r.result == edge.result
                    else "neither",
                    "failed": r.failed,
                }
                for r in evidence.arbitration
                if r.producer == edge.producer
            ],
            "repeats_itself": {
                str(r.replayer): r.result == _first(r, edge, evidence)
                for r in evidence.reruns
                if r.producer == edge.producer
            },
        }


def _first(rerun: Replayed, edge: Replayed, evidence: AuditEvidence) -> str:
    """The first result of whoever ran again."""
    if rerun.replayer == edge.producer:
        return evidence.recorded[edge.producer].result
    if rerun.replayer == edge.replayer:
        return edge.result
    return next(
        (r.result for r in evidence.arbitration if (r.producer, r.replayer) == (rerun.producer, rerun.replayer)), ""
    )


def _words(result: PassResult | None) -> tuple[str, str]:
    """(fingerprint of the loss, digest of all gradients)."""
    if result is None:
        return "", ""
    return result.loss, sha256_hex({name: list(values) for name, values in result.gradients.items()})[:32]


def _digests(result: PassResult) -> dict[str, str]:
    return {name: sha256_hex(list(values))[:16] for name, values in result.gradients.items()}
