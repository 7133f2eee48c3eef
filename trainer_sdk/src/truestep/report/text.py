"""The alarm in plain words, in a box that stands out in a log."""

from __future__ import annotations

import textwrap

from truestep.contract import Alarm, Check, IdentityRow, VerdictKind

WIDTH = 88

_WHAT = {
    Check.NONFINITE: "a gradient became NaN or infinite",
    Check.RING_REPLAY: "a replay of the same micro-batch on another node gave another result",
    Check.WEIGHTS: "the copies of the weights differ between ranks",
    Check.OPTIMIZER_STATE: "the copies of the optimizer state differ between ranks",
    Check.REDUCTION: "the sum of the gradients is not the sum of what the ranks contributed",
    Check.UPDATE_REPLAY: "a replay of the same update on another node gave other weights",
}

_AFTER_UPDATE = frozenset({Check.WEIGHTS, Check.OPTIMIZER_STATE, Check.UPDATE_REPLAY})
"""Checks that look at what an update has left behind."""

_WHO = {
    VerdictKind.CONCLUSIVE: "wrong result computed by",
    VerdictKind.AMBIGUOUS: "not settled which of these is wrong",
    VerdictKind.INPUTS: "nobody is accused: the ranks did not start from the same inputs",
    VerdictKind.NUMERICS: "nobody is accused: every rank computes the same non-finite value",
    VerdictKind.NONDETERMINISTIC: "nobody is accused: the computation does not repeat on one device",
}

ACCUSING = frozenset({VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS})
"""Verdicts with suspects. The others call for a change of the program or its data: nobody else can end a hold."""

RUNBOOK_SECTION = "A box in the training log"

EXIT_NOBODY_ACCUSED = 78
"""Exit code after an alarm that accuses nobody. No tombstone is left: the job may start again at once."""

_REMEDY = {
    VerdictKind.INPUTS: "make every rank start the step from the same batch, random numbers, buffers and software",
    VerdictKind.NUMERICS: "look at the loss, the data and the learning rate of this step",
    VerdictKind.NONDETERMINISTIC: "make the computation repeat (preflight=True or `truestep doctor` names what does "
    "not), or audit losses only",
}


def alarm_text(alarm: Alarm, *, has_bus: bool = True) -> str:
    """What happened, which GPU and node, what happens next. Lines of `WIDTH` columns, no line break at the end.

    has_bus: whether an event bus takes the alarm to a recovery; without one the box promises none.
    """
    verdict = alarm.verdict
    dropped = "" if alarm.check in _AFTER_UPDATE else " The update was dropped on every rank."
    lines = [f"step {alarm.step}: {_WHAT[alarm.check]}.{dropped}", ""]
    lines.append(f"verdict: {verdict.kind}; {_WHO[verdict.kind]}")
    lines += [f"  {_where(row)}" for row in alarm.suspects[:8]]
    if len(alarm.suspects) > 8:
        lines.append(f"  and {len(alarm.suspects) - 8} more")
    lines.append(f"why: {verdict.reason}")
    if verdict.settle:
        lines.append(f"what would settle it: {verdict.settle}")
    lines += ["", _checkpoint(alarm), _next(alarm, has_bus), f'more: docs/runbook.md, "{RUNBOOK_SECTION}"']
    lines.append(f"alarm {alarm.alarm_id}, detected {alarm.detected_at}")
    return boxed(_headline(verdict.kind), lines)


def _headline(kind: VerdictKind) -> str:
    if kind in ACCUSING:
        return "SILENT DATA CORRUPTION: training is stopped"
    return "TRAINING IS STOPPED: nobody is accused, the program or its data must change"


def boxed(title: str, lines: list[str]) -> str:
    """`lines`, wrapped to `WIDTH`, in a box with a title."""
    inner = WIDTH - 4
    wrapped = [part for line in lines for part in (textwrap.wrap(line, inner, subsequent_indent="    ") or [""])]
    top = f"┏━ {title} " + "━" * (WIDTH - 5 - len(title)) + "┓"
    return "\n".join([top, *(f"┃ {line:<{inner}} ┃" for line in wrapped), "┗" + "━" * (WIDTH - 2) + "┛"])


def _where(row: IdentityRow) -> str:
    gpu = row.gpu_uuid or "GPU unknown"
    model = f" ({row.gpu_model})" if row.gpu_model else ""
    pod = f", pod {row.pod_name}" if row.pod_name else ""
    return f"rank {row.rank}: {gpu}{model} on node {row.node_name}{pod}"


def _checkpoint(alarm: Alarm) -> str:
    if alarm.checkpoint is None:
        return "there is no trusted checkpoint yet: resuming means starting again from step 0"
    return f"newest trusted checkpoint: step {alarm.checkpoint.step}, {alarm.checkpoint.uri}"


def _next(alarm: Alarm, has_bus: bool) -> str:
    if alarm.verdict.kind in ACCUSING:
        if not has_bus:
            nodes = list(dict.fromkeys(row.node_name for row in alarm.suspects if row.node_name))
            more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
            cordon = f" (`kubectl cordon {' '.join(nodes[:4])}`{more})" if nodes else ""
            resume = (
                "write a resume directive for the newest trusted checkpoint and start the job again"
                if alarm.checkpoint
                else "remove tombstone.json below the checkpoint root, if there is one, and start again from step 0"
            )
            return (
                "next: the job holds, so that it is not restarted from a corrupt checkpoint on the same node. No event "
                "bus is set (TRUESTEP_EVENT_BUS), so no recovery will come. By hand: 1. stop the job and keep it off "
                f"{'these nodes' if len(nodes) > 1 else 'the node'}{cordon}; 2. {resume} "
                '(SDK\'s README, "Resume by hand").'
            )
        return (
            "next: the job holds, so that it is not restarted from a corrupt checkpoint on the same node. The recovery "
            "quarantines the node, asks for approval to replace it, and resumes from a trusted checkpoint."
        )
    return (
        f"next: no node is touched and the job ends with exit code {EXIT_NOBODY_ACCUSED}. To do: "
        f"{_REMEDY[alarm.verdict.kind]}; then start it again, it resumes from the newest trusted checkpoint. "
        "Unchanged, it is likely to end at the same step again."
    )
