"""States of an incident in which its page looks different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from lambdas.domain.incident import Incident, IncidentStatus, iso
from lambdas.domain.records import (
    CheckpointChoice,
    Confirmation,
    ConfirmationStatus,
    ConfirmedNode,
    Decision,
    Evidence,
    Recommendation,
    Relaunch,
    Replacement,
    Verification,
)
from lambdas.domain.workflow import escalated
from tests.unit.recovery.alarms import a_row
from truestep.contract import DeviceReport, Rank, Step, Verdict, VerdictKind

AMBIGUOUS = {
    "verdict": Verdict(
        kind=VerdictKind.AMBIGUOUS,
        reason="Ranks 1 and 2 disagree about rank 1's gradient in step 120, and no third node took part.",
        suspects=(Rank(1), Rank(2)),
        settle="run on at least 3 nodes: a third one settles which of two is wrong",
    ),
    "suspects": (a_row(1), a_row(2)),
}
NUMERICS = {
    "verdict": Verdict(
        kind=VerdictKind.NUMERICS,
        reason="The gradients of step 120 are not finite on every rank, and again when the step is repeated: the "
        "learning rate, the data or the loss, not one GPU. Look for the first NaN in the loss around step 118.",
        suspects=(),
    ),
    "suspects": (),
}


def _ago(minutes: float) -> str:
    return iso(datetime.now(UTC) - timedelta(minutes=minutes))


def escalates(incident: Incident) -> Incident:
    return escalated(
        incident,
        failed_state="StopTraining",
        error="JobStillRunning",
        cause="2 pods still there: pretrain-worker-0, pretrain-worker-1",
        task_token="t",
        now=datetime.now(UTC),
    ).evolve(status=IncidentStatus.ESCALATED)


def without_data(incident: Incident) -> Incident:
    no_data = {"dcgm-GPU-00000002": "no data: no Prometheus workspace is configured for this cluster"}
    return incident.evolve(
        evidence=Evidence(uri="s3://evidence/incidents/inc/index.json", items=no_data), history=(), confirmation=None
    )


def hardware(incident: Incident) -> Incident:
    (suspect,) = incident.suspects
    node = suspect.node_name
    bad = DeviceReport(device="cuda:3", gpu_uuid="GPU-00000002", runs=1000, differing=314, first="blocks.7.mlp.up")
    good = DeviceReport(device="cuda:0", gpu_uuid="GPU-00000001", runs=1000)
    clean = DeviceReport(device="cuda:0", gpu_uuid="GPU-00000021", runs=1000)
    confirmation = Confirmation(
        status=ConfirmationStatus.REPRODUCED,
        reason=f"{node} differs: GPU-00000002 in 314 of 1,000 runs (hit rate 31%, first at blocks.7.mlp.up); healthy "
        "node hyperpod-i-00000000000000007 differs in 0 of 1,000 runs on 1 GPU",
        hit_probability=0.314,
        nodes=(
            ConfirmedNode(node_name=node, job_name="c-0", ended=True, settled=True, gpus=(good, bad)),
            ConfirmedNode(
                node_name="hyperpod-i-00000000000000007",
                job_name="c-1",
                suspect=False,
                ended=True,
                settled=True,
                gpus=(clean,),
            ),
        ),
    )
    return incident.evolve(
        confirmation=confirmation,
        recommendation=Recommendation(
            action="replace",
            cause="hardware",
            reason=f"A fresh process on the GPU failed again: {confirmation.reason}",
        ),
    ).with_suspect(replace(suspect, other_pods=("team-b/notebook-0", "monitoring/exporter-7")))


def decides(incident: Incident) -> Incident:
    assert incident.approval is not None
    decision = Decision(
        approved=True,
        at=_ago(3),
        decided_by="arn:aws:sts::123456789012:assumed-role/oncall/maria.kowalska@example.com",
        comment="Second time this GPU; agreed with the owners of team-b.",
    )
    return incident.evolve(
        status=IncidentStatus.RECOVERING, approval=replace(incident.approval, decision=decision, task_token="")
    ).noted(at=datetime.now(UTC), state="RequestApproval", outcome="approved", reason="approved")


def recovers(incident: Incident) -> Incident:
    incident = decides(incident)
    (suspect,) = incident.suspects
    exchange = Replacement(
        old_instance_id=suspect.instance_id,
        intended_at=_ago(2.6),
        requested_at=_ago(2.5),
        new_instance_id="i-0beef00d",
        new_node_name="hyperpod-i-0beef00d000000000",
    )
    assert incident.alarm.checkpoint is not None
    chosen = CheckpointChoice(
        checkpoint=incident.alarm.checkpoint,
        reason="step 99 is the newest trusted checkpoint at or before step 110 (newest clean step) minus a margin of "
        "11",
        lost_steps=21,
        margin_steps=11,
        hit_probability=0.314,
    )
    now = datetime.now(UTC)
    for state, outcome in (
        ("ReplaceNode", "requested"),
        ("AwaitReplacement", "replaced"),
        ("ChooseCheckpoint", "chosen"),
        ("Relaunch", "relaunched"),
    ):
        incident = incident.noted(at=now, state=state, outcome=outcome, reason="as the story says")
    return incident.with_suspect(replace(suspect, replacement=exchange)).evolve(
        status=IncidentStatus.VERIFYING,
        checkpoint=chosen,
        relaunch=Relaunch(at=_ago(1)),
        verification=Verification(resumed_at=_ago(0.5), first_step=Step(100)),
    )


def closes(incident: Incident) -> Incident:
    incident = recovers(incident)
    verified = replace(incident.verification, verified_at=_ago(0.3), verified_step=Step(110))
    now = datetime.now(UTC)
    return incident.noted(at=now, state="CloseIncident", outcome="closed", reason="the first audit passed").evolve(
        status=IncidentStatus.CLOSED, closed_at=iso(now), verification=verified
    )


def rehearses(incident: Incident) -> Incident:
    return incident.evolve(dry_run=True)


STATES: dict[str, Callable[[Incident], Incident]] = {
    "escalated": escalates,
    "no-data": without_data,
    "hardware": hardware,
    "decided": decides,
    "recovering": recovers,
    "closed": closes,
    "dry-run": rehearses,
}
