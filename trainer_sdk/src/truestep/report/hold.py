"""After an alarm: leave a tombstone, get the alarm out, then hold until the recovery stops the job.

Exiting instead would let the job's operator restart it on the same bad node from the latest, corrupt checkpoint. An
alarm that accuses nobody is sent and ends the job: no recovery follows it, so nothing would ever end a hold.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from truestep.checkpoints.storage import open_storage
from truestep.contract import (
    TOMBSTONE_NAME,
    Alarm,
    IdentityRow,
    NodeName,
    Rank,
    Tombstone,
    TruestepError,
    canonical_bytes,
)
from truestep.report.reporter import EventReporter, latest_reporter, reporter_from_environment
from truestep.report.text import ACCUSING, EXIT_HOLD_EXPIRED, EXIT_NOBODY_ACCUSED, alarm_text, duration_text

_LOG = logging.getLogger("truestep.report")

EXIT_STOPPED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, the way the recovery (or a person) ends the hold: 143."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code after a Ctrl-C at the terminal that the hold speaks on: 130."""

TAKEOVER_SECONDS = 10.0
"""The next candidate sends the alarm itself this long after the one before it should have."""
LOOK_SECONDS = 0.5
"""Before a job ends over an alarm that accuses nobody: how often a rank looks whether the alarm got out."""
FIRST_LINE_SECONDS = 2.0
"""How long the first line of the hold waits to say that the alarm was accepted; the sending itself goes on."""
CANDIDATES = 3
"""Ranks on different nodes that see to it that the alarm gets out."""
HOLD_LINE = "truestep: holding for {held_seconds:.0f} s after alarm {alarm_id} at step {step}; {outbox}"


class HoldSettingError(TruestepError, ValueError):
    """A setting of the hold cannot be used; the message names it."""


@dataclass(frozen=True, kw_only=True)
class HoldSettings:
    """How long and how loudly to hold. Raises `HoldSettingError` for values that cannot be used."""

    timeout_seconds: float = 21600.0
    """0: the job ends as soon as the alarm got out, or could not."""
    line_every_seconds: float = 60.0
    line: str = HOLD_LINE
    """`str.format` template; fields: alarm_id, step, rank, held_seconds, left_seconds, outbox."""
    takeover_seconds: float = TAKEOVER_SECONDS

    def __post_init__(self) -> None:
        if not self.timeout_seconds >= 0:
            raise HoldSettingError(
                f"timeout_seconds is {self.timeout_seconds}; give a number of seconds, or 0 to hold nothing"
            )
        for name in ("line_every_seconds", "takeover_seconds"):
            if not getattr(self, name) > 0:
                raise HoldSettingError(f"{name} is {getattr(self, name)}; give a number of seconds above 0")
        try:
            self.line.format(alarm_id="", step=0, rank=0, held_seconds=0.0, left_seconds=0.0, outbox="")
        except (LookupError, ValueError) as error:
            raise HoldSettingError(
                f"TRUESTEP_HOLD_LINE {self.line!r} cannot be filled in ({error!r}); its fields are alarm_id, step, "
                "rank, held_seconds, left_seconds and outbox, in braces"
            ) from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HoldSettings:
        """Reads ``TRUESTEP_HOLD_TIMEOUT_SECONDS`` and ``TRUESTEP_HOLD_LINE``."""
        text = environ.get("TRUESTEP_HOLD_TIMEOUT_SECONDS") or "21600"
        try:
            timeout_seconds = float(text)
        except ValueError:
            raise HoldSettingError(f"TRUESTEP_HOLD_TIMEOUT_SECONDS is {text!r}; give a number of seconds") from None
        return cls(timeout_seconds=timeout_seconds, line=environ.get("TRUESTEP_HOLD_LINE") or HOLD_LINE)


def report_sdc(
    alarm: Alarm,
    *,
    reporter: EventReporter | None = None,
    settings: HoldSettings | None = None,
    environ: Mapping[str, str] | None = None,
) -> NoReturn:
    """Send the alarm and hold. Every rank calls it with the alarm that `train` returned; no collective, no accelerator.

    Writes the tombstone at the checkpoint root, flushes the outbox, prints a line a minute on standard output (one rank
    a node), and goes on sending what is in the outbox. Ends by raising `SystemExit`: `EXIT_STOPPED` after SIGTERM,
    `EXIT_INTERRUPTED` after SIGINT (both heard on the main thread only), `EXIT_HOLD_EXPIRED` after the timeout.

    A verdict that accuses nobody (`INPUTS`, `NUMERICS`, `NONDETERMINISTIC`) leaves no tombstone and is not held: the
    alarm is sent, in bounded time, and `EXIT_NOBODY_ACCUSED` raised.

    reporter: default: the process's own, or one from the environment. environ: default `os.environ`.
    """
    if not isinstance(alarm, Alarm):
        raise TypeError(
            f"report_sdc needs the alarm that train returned, got {alarm!r}; where train returned None nothing is "
            "wrong: `if alarm is not None: report_sdc(alarm)`"
        )
    env = os.environ if environ is None else environ
    reporter = reporter or latest_reporter() or _reporter(alarm, env)
    settings = settings or _settings(env)
    ranks = reporting_ranks(alarm, _integer(env, "LOCAL_WORLD_SIZE", 1))
    turn = ranks.index(reporter.rank) if reporter.rank in ranks else None
    accuses = alarm.verdict.kind in ACCUSING
    holds = accuses and settings.timeout_seconds > 0
    root = reporter.run.checkpoint_root or env.get("TRUESTEP_CHECKPOINT_ROOT", "")
    with _termination() as stop:
        if turn is not None and accuses:
            bury(alarm, root)
        if turn == 0:
            # On its way first, in case standard output hangs; the wait for the bus must not keep the box back.
            with _surviving("sending the alarm"):
                reporter.alarm(alarm, wait=False)
            has_bus, hold_seconds = reporter.bus is not None, settings.timeout_seconds
            _say(alarm_text(alarm, has_bus=has_bus, checkpoint_root=root, hold_seconds=hold_seconds))
            with _surviving("sending the alarm"):
                reporter.flush(FIRST_LINE_SECONDS)
            if holds:
                _say(
                    f"truestep: holding until the job is stopped, for {duration_text(hold_seconds)} at most; "
                    f"{_whereabouts(alarm, reporter)}"
                )
        # One rank of a node, so that every pod's log has its line and a log of many ranks not one from each.
        speaks = _integer(env, "LOCAL_RANK", 0) == 0
        if holds:
            code = _hold(alarm, reporter, settings, turn, stop, speaks=speaks)
        else:
            code = _leave(alarm, reporter, settings, turn, stop)
            code = code or (EXIT_HOLD_EXPIRED if accuses else EXIT_NOBODY_ACCUSED)
        if code == EXIT_INTERRUPTED and speaks:
            _say(f"truestep: interrupted (Ctrl-C); the job ends with exit code {EXIT_INTERRUPTED}")
    _keep_exit_code()
    raise SystemExit(code)


def reporting_ranks(alarm: Alarm, local_world_size: int) -> list[Rank]:
    """Who sends the alarm, first to last: one rank a node, lowest first, suspects last; at most `CANDIDATES`."""
    suspects = set(alarm.suspect_ranks)
    order = sorted(range(alarm.run.world_size), key=lambda rank: (rank in suspects, rank))
    nodes: dict[int, Rank] = {}
    for rank in order:
        nodes.setdefault(rank // max(1, local_world_size), Rank(rank))
        if len(nodes) == CANDIDATES:
            break
    return list(nodes.values())


def bury(alarm: Alarm, checkpoint_root: str) -> None:
    """Write the tombstone. Never raises: without one the hold is still worth its while, so a failure is logged."""
    if not checkpoint_root:
        _LOG.warning("no checkpoint root is known: no tombstone is written, so a restart is not held back")
        return
    tombstone = Tombstone(
        alarm_id=alarm.alarm_id,
        step=alarm.step,
        run_id=alarm.run.run_id,
        attempt_id=alarm.run.attempt_id,
        at=alarm.detected_at,
    )
    try:
        open_storage(checkpoint_root).replace(TOMBSTONE_NAME, canonical_bytes(tombstone))
    except Exception:
        _LOG.exception("the tombstone at %s could not be written: a restart is not held back", checkpoint_root)


def _hold(
    alarm: Alarm,
    reporter: EventReporter,
    settings: HoldSettings,
    turn: int | None,
    stop: queue.SimpleQueue[int],
    *,
    speaks: bool,
) -> int:
    start = time.monotonic()
    deadline, next_line = start + settings.timeout_seconds, start + settings.line_every_seconds
    takeover = start + settings.takeover_seconds * turn if turn else None
    while (now := time.monotonic()) < deadline:
        if takeover is not None and now >= takeover:
            takeover = None
            with _surviving("taking over the alarm"):
                _take_over(alarm, reporter)
        if now >= next_line:
            next_line += settings.line_every_seconds
            if speaks:
                _say(_line(alarm, reporter, settings, now - start))
            if turn is not None:
                with _surviving("sending what is in the outbox"):
                    reporter.retry_all()
        wake = min(deadline, next_line, deadline if takeover is None else takeover)
        try:
            number = stop.get(timeout=max(0.0, wake - time.monotonic()))
        except queue.Empty:
            continue
        with _surviving("sending what is in the outbox"):
            reporter.flush(2.0)
        return 128 + number
    if speaks:
        _say(
            f"truestep: nobody stopped the job within {duration_text(settings.timeout_seconds)}; it ends with exit "
            f"code {EXIT_HOLD_EXPIRED}"
        )
    return EXIT_HOLD_EXPIRED


def _leave(
    alarm: Alarm, reporter: EventReporter, settings: HoldSettings, turn: int | None, stop: queue.SimpleQueue[int]
) -> int:
    """Wait until the alarm got out, or no rank is left to send it: the first rank to end takes the others with it.

    The exit code where a signal ended the wait, else 0.
    """
    start = time.monotonic()
    deadline = start + settings.takeover_seconds * CANDIDATES
    takeover = start + settings.takeover_seconds * turn if turn else None
    while (now := time.monotonic()) < deadline and not _got_out(alarm, reporter):
        if takeover is not None and now >= takeover:
            takeover = None
            with _surviving("taking over the alarm"):
                _take_over(alarm, reporter)
        with suppress(queue.Empty):
            return 128 + stop.get(timeout=min(LOOK_SECONDS, settings.takeover_seconds))
    return 0


def _got_out(alarm: Alarm, reporter: EventReporter) -> bool:
    """Accepted by the bus; without one it can get no further than the outbox."""
    if reporter.bus is not None:
        return reporter.was_accepted(alarm.alarm_id)
    return reporter.outbox.is_pending(alarm.alarm_id)


@contextmanager
def _surviving(what: str) -> Iterator[None]:
    """The hold keeps the job from a corrupt restart: no failure of what it does meanwhile may end it."""
    try:
        yield
    except Exception:
        _LOG.exception("%s failed; this rank goes on waiting", what)


def _say(text: str) -> None:
    """A line on standard output, or in the log where standard output takes nothing (full disk, closed pipe)."""
    try:
        print(text, flush=True)
    except Exception as error:
        _LOG.error("standard output takes nothing (%s); it was to say: %s", error, text)


def _keep_exit_code() -> None:
    """Let go of a stream that takes nothing: Python flushes both when it ends, and a failure would turn the exit code
    into 120."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except Exception:
            setattr(sys, name, None)


def _take_over(alarm: Alarm, reporter: EventReporter) -> None:
    if reporter.bus is not None and not reporter.was_accepted(alarm.alarm_id):
        _LOG.warning(
            "alarm %s was not sent by the rank before this one; rank %d sends it", alarm.alarm_id, reporter.rank
        )
        reporter.alarm(alarm)


def _whereabouts(alarm: Alarm, reporter: EventReporter) -> str:
    if reporter.was_accepted(alarm.alarm_id):
        return "the alarm was accepted"
    if reporter.bus is None:
        return f"no event bus is set, the alarm stays in the outbox {reporter.outbox.directory}"
    if reporter.outbox.is_refused(alarm.alarm_id):
        return f"the alarm cannot be sent, {reporter.outbox.reason_path(alarm.alarm_id)} says why"
    return "the alarm is not accepted yet"


def _line(alarm: Alarm, reporter: EventReporter, settings: HoldSettings, held_seconds: float) -> str:
    return settings.line.format(
        alarm_id=alarm.alarm_id,
        step=alarm.step,
        rank=reporter.rank,
        held_seconds=held_seconds,
        left_seconds=settings.timeout_seconds - held_seconds,
        outbox=_whereabouts(alarm, reporter),
    )


@contextmanager
def _termination() -> Iterator[queue.SimpleQueue[int]]:
    """A queue of SIGTERM and SIGINT. SimpleQueue, because its put is safe where a signal interrupts its own get."""
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    interrupted = False

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = interrupted or number == signal.SIGINT
        received.put(number)

    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, hear)}
    # Where SIGINT is ignored, as for a job in the background of a shell, it stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, hear)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            # torchrun passes the terminal's Ctrl-C on: a second one a moment later is the same one.
            again = interrupted and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if again else handler)


def _settings(env: Mapping[str, str]) -> HoldSettings:
    try:
        return HoldSettings.from_environment(env)
    except HoldSettingError as error:
        # An alarm is the wrong moment to fail over a setting.
        _say(f"truestep: {error}; holding with the defaults")
        return HoldSettings()


def _reporter(alarm: Alarm, env: Mapping[str, str]) -> EventReporter:
    identity = IdentityRow(
        rank=Rank(_integer(env, "RANK", 0)),
        local_rank=_integer(env, "LOCAL_RANK", 0),
        node_name=NodeName(env.get("NODE_NAME", "")),
    )
    return reporter_from_environment(identity, alarm.run, env)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else default
