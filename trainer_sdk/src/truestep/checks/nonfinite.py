"""Non-finite gradients: who had one first, and whether other nodes get one from the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from truestep.attachment import Attachment
from truestep.bundle.failing import FailingPass, choose_agreed_pass
from truestep.bundle.modes import read_modes
from truestep.bundle.writing import party_result
from truestep.checks.batches import BatchChangedError, RebuildError, rebuilt
from truestep.checks.buckets import StepGradients
from truestep.checks.finding import SHOWN_NAMES, Finding
from truestep.checks.recording import PassRecording
from truestep.checks.topology import Ring
from truestep.contract import Check, Rank, Step, sha256_hex
from truestep.fingerprint import fingerprint_nested
from truestep.judge_nonfinite import NonfiniteReplay, judge_nonfinite
from truestep.replay import ComputeLoss, PassInputs, PassResult, RebuildBatch, replay

REPLAYS = 2
"""Other nodes that replay the accused rank's micro-batch before anyone is named."""


def confirm_nonfinite(
    step: Step,
    seen: StepGradients,
    recording: PassRecording | None,
    *,
    attachment: Attachment,
    module: nn.Module,
    ring: Ring | None,
    compute_loss: ComputeLoss | None,
    rebuild_batch: RebuildBatch | None,
) -> Finding:
    """Judge a step in which some rank saw a non-finite gradient. Collective over all ranks.

    Without `compute_loss`, a ring or the batch nothing is replayed, and the verdict stays ambiguous.
    """
    cpu, me = attachment.cpu_group, attachment.rank
    known = recording is not None and (recording.has_batch or rebuild_batch is not None)
    can_replay = known and ring is not None and compute_loss is not None
    payload, unknown = b"", ""
    if seen.local_nonfinite and can_replay and recording is not None:
        payload, unknown = _payload(step, recording, rebuild_batch, me)
    rows = cpu.gather_rows(
        {
            "local": list(seen.local_nonfinite),
            "reduced": list(seen.reduced_nonfinite),
            "can_replay": can_replay,
            "unknown": unknown,
            "partly": recording is not None and recording.one_of_several,
        }
    )
    accused = [Rank(rank) for rank, row in enumerate(rows) if row["local"]]
    replays: list[NonfiniteReplay] = []
    results: dict[Rank, PassResult] = {}
    digests: dict[Rank, dict[Rank, str]] = {}
    shipped: dict[int, bytes] = {}
    if (
        all(row["can_replay"] for row in rows)
        and ring is not None
        and compute_loss is not None
        and not any(row["unknown"] for row in rows)
    ):
        transfers = [
            (int(rank), int(other))
            for rank in accused
            for other in ring.others(rank, {attachment.nodes[rank]}, REPLAYS)
        ]
        shipped = cpu.exchange(transfers, payload)
        mine = []
        for source, data in sorted(shipped.items()):
            replayed, result = _replay_once(module, Rank(source), me, data, compute_loss)
            mine.append(replayed)
            if result is not None:
                results[Rank(source)] = result
        digest = {str(source): sha256_hex(asdict(party_result(result)))[:32] for source, result in results.items()}
        gathered = cpu.gather_rows({"replays": [asdict(replayed) for replayed in mine], "results": digest})
        replays = [NonfiniteReplay(**entry) for row in gathered for entry in row["replays"]]
        for rank, row in enumerate(gathered):
            for source, value in row["results"].items():
                digests.setdefault(Rank(int(source)), {})[Rank(rank)] = value
    reduced = [Rank(rank) for rank, row in enumerate(rows) if row["reduced"]]
    unknown_inputs = {Rank(rank): str(row["unknown"]) for rank, row in enumerate(rows) if row["unknown"]}
    verdict = judge_nonfinite(
        nodes=attachment.nodes,
        local=accused,
        reduced=reduced,
        replays=replays,
        unknown_inputs=unknown_inputs,
        partly={rank for rank in accused if rows[rank]["partly"]},
    )
    chosen = choose_agreed_pass(verdict, digests)
    failing = None
    if chosen is not None:
        held = payload if me == chosen.producer else shipped.get(chosen.producer, b"")
        failing = FailingPass(
            chosen=chosen,
            compares_loss=True,
            compares_gradients=True,
            modes=read_modes(),
            own=results.get(chosen.producer),
            payload=held,
        )
    evidence = _evidence(attachment, rows, accused, replays)
    return Finding(check=Check.NONFINITE, verdict=verdict, evidence=evidence, failing=failing)


def _payload(step: Step, recording: PassRecording, rebuild_batch: RebuildBatch | None, me: Rank) -> tuple[bytes, str]:
    """What the pass started from, and else why that is not certain: then no replay may accuse anybody."""
    try:
        again = rebuilt(rebuild_batch, step, me) if rebuild_batch is not None else None
        if not recording.has_batch:
            return recording.inputs(again).to_bytes(), ""
        try:
            batch = recording.batch()
        except BatchChangedError:
            if rebuild_batch is None:
                raise
            return recording.inputs(again).to_bytes(), ""
        if rebuild_batch is not None and fingerprint_nested(again) != fingerprint_nested(batch):
            return b"", f"rebuild_batch({step}, {me}) gives another batch than the one trained on"
        return recording.inputs(batch).to_bytes(), ""
    except RebuildError as error:
        return b"", str(error)[:500]
    except Exception as error:
        return b"", f"{type(error).__name__}: {error}"[:500]


def _replay_once(
    module: nn.Module, producer: Rank, me: Rank, data: bytes, compute_loss: ComputeLoss
) -> tuple[NonfiniteReplay, PassResult | None]:
    try:
        result = replay(module, PassInputs.from_bytes(data), compute_loss, notes_nonfinite=True)
    except Exception as error:
        return NonfiniteReplay(producer=producer, replayer=me, failed=f"{type(error).__name__}: {error}"[:500]), None
    return NonfiniteReplay(producer=producer, replayer=me, nonfinite=result.nonfinite), result


def _evidence(
    attachment: Attachment, rows: Sequence[dict[str, Any]], accused: Sequence[Rank], replays: Sequence[NonfiniteReplay]
) -> dict[str, Any]:
    buckets = sorted({index for rank in accused for index in rows[rank]["local"]})
    names = [name for index in buckets for name in attachment.sensor.bucket_parameters(index)]
    return {
        "ranks_with_nonfinite_local_gradient": len(accused),
        "buckets": buckets[:SHOWN_NAMES],
        "parameters_of_these_buckets": names[:SHOWN_NAMES],
        "replays": [asdict(replayed) for replayed in replays[:SHOWN_NAMES]],
    }
