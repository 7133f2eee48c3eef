"""``truestep confirm``: what repeating a bundle's computation showed, for people or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from truestep.cli import FINDING, FINE
from truestep.cli.output import print_json, print_table, say
from truestep.cli.tensors import require_torch
from truestep.contract import to_json

if TYPE_CHECKING:
    from truestep.bundle.confirming import Confirmation

QUIET_SECONDS = 2.0
"""Shorter repetitions show no progress."""
SHOWN_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    bundle: str
    device: str
    repeat: int
    model: str
    allow_version_mismatch: bool
    allow_classes: bool
    locate: bool


def show_confirmation(request: Request, *, as_json: bool) -> int:
    """Repeat the bundle's computation and print what that showed; the exit code."""
    require_torch("confirm")
    from truestep.bundle.confirming import confirm, load_factory, usable_device
    from truestep.bundle.contents import BundleError
    from truestep.bundle.reading import open_bundle

    bundle = open_bundle(request.bundle)
    device = usable_device(request.device)
    factory = request.model or bundle.manifest.model
    if not factory:
        raise BundleError(
            "the bundle does not say how its model is built: give --model module:function, a function that returns "
            "(model, compute_loss); Guard(bundles=BundleSettings(model=...)) writes it into the next one"
        )
    model, compute_loss = load_factory(factory)
    with _progress(request.repeat) as advance:
        confirmation = confirm(
            bundle,
            model,
            compute_loss,
            device,
            repeat=request.repeat,
            allow_version_mismatch=request.allow_version_mismatch,
            allow_classes=request.allow_classes,
            locate=request.locate,
            on_run=advance,
        )
    if as_json:
        print_json({**to_json(confirmation), "differs": confirmation.differs, "conclusion": conclusion(confirmation)})
    else:
        _print(confirmation)
    return FINDING if confirmation.differs else FINE


def conclusion(found: Confirmation) -> str:
    """What follows, and what does not."""
    where = found.gpu_uuid or found.device
    if found.version_differences:
        return "Nothing follows either way: other library versions or another GPU model compute other bits."
    if found.weights_changed:
        return f"{where} on {found.node_name} does not hold what is copied to it: its memory or the way there is bad."
    if found.raised:
        return f"{where} on {found.node_name} could not repeat what it had run before; read its driver's log."
    if found.differing and found.settled:
        return (
            f"{where} on {found.node_name} computes this wrongly now as well: the same software and inputs gave the "
            "witnesses another result. Run it on other GPUs of this model too; if they are clean, it is the hardware."
        )
    if found.differing:
        return (
            f"{where} on {found.node_name} does not repeat itself, or repeats nobody's result. Run it on other GPUs of "
            "the same model: if they are clean, it is the hardware."
        )
    return (
        f"No difference proves nothing: a GPU that computes this wrongly in up to {_share(found.hit_rate_high)} of "
        "passes would often show none, and a fault may need the heat or the neighbours of the real job."
    )


def _print(found: Confirmation) -> None:
    if found.simulated_fault:
        say("A simulated fault is in place on this stand-in node.", style="bold")
    for difference in found.version_differences:
        say(f"Not comparable: {difference}.", style="bold")
    name = found.versions["device"]
    say(
        f"Step {found.step}, micro-batch of rank {found.producer}, on {found.node_name} {found.device} ({name}"
        f"{', ' + found.gpu_uuid if found.gpu_uuid else ''}); compared with {found.reference}."
    )
    say(
        f"{found.differing:,} of {found.runs:,} runs differ: hit rate {_share(found.hit_rate)} "
        f"(95% interval {_share(found.hit_rate_low)} to {_share(found.hit_rate_high)})."
    )
    if found.differing:
        say(
            f"{found.as_recorded:,} of them gave the wrong result of the audit again, bit for bit; "
            f"in {found.losses_differing:,} the loss differs, in the others gradients alone."
        )
    _print_places(found)
    if found.weights_changed:
        say(f"Read differently on the device than they were copied to it: {', '.join(found.weights_changed[:8])}.")
    if found.raised:
        say(f"Ended early: {found.raised}.")
    say(conclusion(found), style="bold")


def _print_places(found: Confirmation) -> None:
    if found.first_modules:
        rows = [[place, f"{runs:,}"] for place, runs in list(found.first_modules.items())[:SHOWN_ROWS]]
        print_table("First wrong value", [("output or its gradient", "left"), ("runs", "right")], rows)
    elif found.differing and found.located:
        say(f"Which module went wrong first is not known: {found.located}.")
    if found.parameters:
        rows = [[name, f"{runs:,}"] for name, runs in list(found.parameters.items())[:SHOWN_ROWS]]
        print_table(
            f"Wrong gradients ({found.parameters_differing} parameters)",
            [("parameter", "left"), ("runs", "right")],
            rows,
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """What to call after each run; a bar on standard error once it has taken a while."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task("runs", total=total)
    began = time.monotonic()

    def advance() -> None:
        progress.advance(task)
        if not progress.live.is_started and time.monotonic() - began > QUIET_SECONDS:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()


def _share(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f}%" if percent in (0, 100) else f"{percent:.2g}%" if percent < 10 else f"{percent:.1f}%"
