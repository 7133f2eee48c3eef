"""The alarm in plain words, in a box that stands out in a log."""

from __future__ import annotations

import shlex
import textwrap
from urllib.parse import unquote, urlsplit

from truestep.contract import TOMBSTONE_NAME, Alarm, Check, IdentityRow, VerdictCause, VerdictKind
from truestep.contract.alarm import NODES_OF_RUN
from truestep.contract.words import counted
from truestep.directives import ORDER_COMMAND

WIDTH = 80

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
    VerdictKind.CONCLUSIVE: "a wrong result was computed by",
    VerdictKind.AMBIGUOUS: "one of these is wrong, and which one is not settled",
    VerdictKind.INPUTS: "nobody is accused, the ranks did not start from the same inputs",
    VerdictKind.NUMERICS: "nobody is accused, every rank computes the same non-finite value",
    VerdictKind.NONDETERMINISTIC: "nobody is accused, the computation does not repeat on one device",
}

_CAUSE = {
    VerdictCause.OPEN: "cause: open; one alarm cannot tell a bad GPU from a rare race in software",
    VerdictCause.HARDWARE: "cause: hardware; the same GPU was caught before, and others do this right",
}

ACCUSING = frozenset({VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS})
"""Verdicts with suspects. The others call for a change of the program or its data: nobody else can end a hold."""

RUNBOOK_SECTION = "A box in the training log"

EXIT_NOBODY_ACCUSED = 78
"""Exit code after an alarm that accuses nobody. No tombstone is left: the job may start again at once."""

EXIT_HOLD_EXPIRED = 76
"""Exit code after ``TRUESTEP_HOLD_TIMEOUT_SECONDS``: nobody came. A restart is refused because of the tombstone."""

_COMMAND = "      "
"""What a line of the box begins with that people copy: it is never wrapped, and a longer one has no edge behind it."""

_REMEDY = {
    VerdictKind.INPUTS: "let rebuild_batch(step, rank) give the very batch that the rank of this number trained on, "
    "whichever rank calls it, or pass None for it; where not the batch differed, change what wrote to what did (see "
    "why)",
    VerdictKind.NUMERICS: "look at the loss, the data and the learning rate of this step",
    VerdictKind.NONDETERMINISTIC: "make the computation repeat (preflight=True or `truestep doctor` names what does "
    "not), or audit losses only",
}


def alarm_text(alarm: Alarm, *, has_bus: bool = True, checkpoint_root: str = "", hold_seconds: float = 21600.0) -> str:
    """What happened, which GPU and node, what happens next. Lines of `WIDTH` columns, no line break at the end.

    has_bus: whether an event bus takes the alarm to a recovery; without one the box promises none, and says the steps.
    checkpoint_root: where the tombstone lies; default, the alarm's own; empty where the run keeps no checkpoints.
    hold_seconds: how long an accused job is held; 0: it ends at once.
    """
    verdict, root = alarm.verdict, checkpoint_root or alarm.run.checkpoint_root
    dropped = "" if alarm.check in _AFTER_UPDATE else " The update was dropped on every rank."
    lines = [f"step {alarm.step}: {_WHAT[alarm.check]}.{dropped}", ""]
    named = verdict.kind not in ACCUSING or alarm.suspects
    lines.append(f"verdict: {verdict.kind}; {_WHO[verdict.kind] if named else 'no rank can be named'}")
    lines += [f"  {_where(row)}" for row in alarm.suspects[:8]]
    if len(alarm.suspects) > 8:
        lines.append(f"  and {len(alarm.suspects) - 8} more")
    if verdict.kind in ACCUSING:
        lines.append(_CAUSE[verdict.cause])
    lines.append(f"why: {verdict.reason}")
    if verdict.settle:
        lines.append(f"what would settle it: {verdict.settle}")
    lines += ["", *_checkpoint(alarm, root), ""]
    if verdict.kind not in ACCUSING:
        lines += _leaving(alarm, root)
    else:
        lines.append(_holding(root, hold_seconds))
        lines += [_recovery(alarm)] if has_bus else _by_hand(alarm, root, holds=hold_seconds > 0)
    lines += ["", f'more: docs/runbook.md, "{RUNBOOK_SECTION}"']
    lines.append(f"alarm {alarm.alarm_id}, detected {alarm.detected_at}")
    return boxed(_headline(verdict.kind), lines)


def duration_text(seconds: float) -> str:
    """``6 h``, ``90 min`` or ``45 s``."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.3g} s"


def _headline(kind: VerdictKind) -> str:
    if kind in ACCUSING:
        return "SILENT DATA CORRUPTION: training is stopped"
    return "TRAINING IS STOPPED: nobody is accused; program or data must change"


def boxed(title: str, lines: list[str]) -> str:
    """`lines`, wrapped to `WIDTH`, in a box with a title."""
    inner = WIDTH - 4
    wrapped = [part for line in lines for part in _wrapped(line, inner)]
    top = f"┏━ {title} " + "━" * (WIDTH - 5 - len(title)) + "┓"
    sides = (f"┃ {line:<{inner}} ┃" if len(line) <= inner else f"┃ {line}" for line in wrapped)
    return "\n".join([top, *sides, "┗" + "━" * (WIDTH - 2) + "┛"])


def _wrapped(line: str, width: int) -> list[str]:
    if line.startswith(_COMMAND):
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) or [""]


def _where(row: IdentityRow) -> str:
    gpu = row.gpu_uuid or "GPU unknown"
    model = f" ({row.gpu_model})" if row.gpu_model else ""
    pod = f", pod {row.pod_name}" if row.pod_name else ""
    return f"rank {row.rank}: {gpu}{model} on node {row.node_name}{pod}"


def _checkpoint(alarm: Alarm, root: str) -> list[str]:
    if alarm.checkpoint is not None:
        return [f"newest trusted checkpoint: step {alarm.checkpoint.step}", f"{_COMMAND}{alarm.checkpoint.uri}"]
    clean = "no audit has passed yet" if alarm.clean_through is None else f"clean through step {alarm.clean_through}"
    if root:
        return [f"trusted checkpoint: none yet below {root} ({clean})"]
    return [f"trusted checkpoint: none, this run keeps no VerifiedCheckpoints ({clean})"]


def _leaving(alarm: Alarm, root: str) -> list[str]:
    from_where = {
        True: "it resumes from the trusted checkpoint above",
        False: "it starts at step 0" if root else "from a checkpoint of your own, if you keep any",
    }[alarm.checkpoint is not None]
    return [
        f"next: no node is touched, and the job ends with exit code {EXIT_NOBODY_ACCUSED}.",
        f"To do: {_REMEDY[alarm.verdict.kind]}; then start it again: {from_where}. Unchanged, it is likely to end at "
        "the same step again.",
    ]


def _holding(root: str, hold_seconds: float) -> str:
    if hold_seconds > 0:
        return (
            f"next: the job holds, for {duration_text(hold_seconds)} at most, so that it is not restarted from a "
            "corrupt checkpoint on the same node."
        )
    ends = f"next: the job ends with exit code {EXIT_HOLD_EXPIRED} (TRUESTEP_HOLD_TIMEOUT_SECONDS is 0)"
    if root:
        return f"{ends}; {TOMBSTONE_NAME} at the checkpoint root refuses every restart until it is answered."
    return f"{ends}, and nothing refuses a restart on the same node: no checkpoint root is known."


def _recovery(alarm: Alarm) -> str:
    nodes = len(_nodes(alarm))
    what = "the node" if nodes == 1 else "these nodes" if nodes else "whatever it can name"
    then = (
        "resumes from a trusted checkpoint"
        if alarm.checkpoint
        else "asks people where to start, since no checkpoint is trusted"
    )
    return f"The recovery quarantines {what}, asks for approval before it replaces hardware, and {then}."


def _by_hand(alarm: Alarm, root: str, *, holds: bool) -> list[str]:
    nodes, first = _nodes(alarm), "stop the job, and keep it off" if holds else "keep the job off"
    lines = ["No event bus is set (TRUESTEP_EVENT_BUS), so no recovery will come. By hand:"]
    if alarm.evidence.get(NODES_OF_RUN) == 1 and alarm.run.world_size > 1 and nodes:
        lines.append(f"  1. {'stop the job' if holds else 'keep the job off for now'}. {_one_node(nodes[0])}")
    elif nodes:
        lines.append(f"  1. {first} {'the node' if len(nodes) == 1 else 'these nodes'}:")
        lines += [f"{_COMMAND}kubectl cordon {' '.join(nodes[:4])}"]
        if len(nodes) > 4:
            lines.append(f"    and {counted(len(nodes) - 4, 'other node')}")
    else:
        lines.append(f"  1. {first} the bad node, which has to be found first: see why")
    if alarm.checkpoint is not None:
        lines += ["  2. order where it starts again:", f"{_COMMAND}{ORDER_COMMAND} {alarm.checkpoint.uri}"]
    elif root:
        lines += ["  2. nothing is trusted; to let it start at step 0:", f"{_COMMAND}{_removing(root)}"]
    elif alarm.clean_through is not None:
        lines.append(f"  2. take a checkpoint of your own that holds step {alarm.clean_through} or an earlier one")
    else:
        lines.append("  2. take no checkpoint of this run: none is known to be clean")
    return [*lines, "  3. start the job again"]


def _one_node(node: str) -> str:
    """Instead of a cordon, which would leave the run without any node and says nothing of which GPU it is."""
    return (
        f"Every rank says that it is on {node}. Where that is so, test the GPUs of the ranks above before the next "
        "start; where not, set NODE_NAME on each rank before attach, so that the next alarm can name one"
    )


def _removing(root: str) -> str:
    tombstone = f"{root}/{TOMBSTONE_NAME}"
    parts = urlsplit(tombstone)
    return f"rm {shlex.quote(unquote(parts.path))}" if parts.scheme == "file" else f"aws s3 rm {tombstone}"


def _nodes(alarm: Alarm) -> list[str]:
    return list(dict.fromkeys(row.node_name for row in alarm.suspects if row.node_name))
