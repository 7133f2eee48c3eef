"""Alarms for the recovery's tests."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from truestep.contract import (
    Alarm,
    Check,
    CheckpointRef,
    IdentityRow,
    NodeName,
    Rank,
    RunRef,
    Step,
    Verdict,
    VerdictKind,
    alarm_id,
)

CLUSTER_ARN = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"
NOW = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)


def an_alarm(
    *, kind: VerdictKind = VerdictKind.CONCLUSIVE, ranks: tuple[int, ...] = (2,), step: int = 120, **run: Any
) -> Alarm:
    """An audit's alarm that names `ranks`, each on a node and GPU of its own."""
    reference = RunRef(
        run_id="run-1",
        attempt_id="attempt-1",
        world_size=4,
        cluster_arn=CLUSTER_ARN,
        region="us-east-1",
        namespace="team-a",
        job_name="pretrain",
        checkpoint_root="s3://checkpoints/run-1",
    )
    reference = dataclasses.replace(reference, **run)
    accusing = kind in (VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS)
    suspects = tuple(Rank(rank) for rank in ranks) if accusing else ()
    return Alarm(
        alarm_id=alarm_id(reference, Check.RING_REPLAY, Step(step), suspects),
        run=reference,
        check=Check.RING_REPLAY,
        step=Step(step),
        verdict=Verdict(kind=kind, reason="Rank 2's gradient differs from both replays of it.", suspects=suspects),
        suspects=tuple(a_row(rank) for rank in suspects),
        clean_through=Step(step - 10),
        checkpoint=CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32),
        detected_at="2026-03-01T02:29:58Z",
    )


def a_row(rank: int) -> IdentityRow:
    return IdentityRow(
        rank=Rank(rank),
        local_rank=0,
        node_name=NodeName(f"hyperpod-i-{rank:017x}"),
        pod_name=f"pretrain-worker-{3 - rank}",
        gpu_uuid=f"GPU-{rank:08x}",
        gpu_model="NVIDIA H200",
    )
