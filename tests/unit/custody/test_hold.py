"""The hold: the alarm gets out, a tombstone stays behind, and the job waits to be stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO

import boto3
import pytest
from moto.server import ThreadedMotoServer

import truestep
from tests.unit.custody.events import RUN, Bus, accusing_nobody, an_alarm, identity
from truestep.contract import Alarm, VerdictKind
from truestep.report import (
    EXIT_HOLD_EXPIRED,
    EXIT_INTERRUPTED,
    EXIT_NOBODY_ACCUSED,
    EXIT_STOPPED,
    EventBus,
    EventReporter,
    HoldSettings,
    Outbox,
    RetryPolicy,
    hold,
    report_sdc,
)
from truestep.report.hold import HoldSettingError, reporting_ranks


@pytest.fixture
def bus(aws: str) -> Bus:
    return Bus.create()


def test_who_sends_the_alarm_is_one_rank_a_node_with_suspects_last() -> None:
    alarm = an_alarm()
    big = dataclasses.replace(alarm, run=dataclasses.replace(alarm.run, world_size=16384))
    assert reporting_ranks(big, 8) == [0, 8, 16]
    assert reporting_ranks(alarm, 1) == [0, 1, 3]
    assert reporting_ranks(alarm, 4) == [0]


@pytest.mark.parametrize("value", ["soon", "-5", "nan"])
def test_a_hold_timeout_that_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(HoldSettingError, match="number of seconds"):
        HoldSettings.from_environment({"TRUESTEP_HOLD_TIMEOUT_SECONDS": value})


def test_a_hold_of_0_seconds_ends_at_once_with_the_alarm_kept_and_no_word_of_a_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dataclasses.replace(RUN, checkpoint_root=(tmp_path / "checkpoints").as_uri())
    reporter, alarm = EventReporter(identity(), run, Outbox(tmp_path / "outbox"), None), an_alarm(run=run)
    with pytest.raises(SystemExit) as end:
        report_sdc(alarm, reporter=reporter, environ={"TRUESTEP_HOLD_TIMEOUT_SECONDS": "0"})
    assert end.value.code == EXIT_HOLD_EXPIRED
    assert [entry.event_id for entry in reporter.outbox.pending()] == [alarm.alarm_id]
    assert (tmp_path / "checkpoints" / "tombstone.json").exists()
    assert "hold" not in capsys.readouterr().out.replace("TRUESTEP_HOLD_TIMEOUT_SECONDS", "")


@pytest.mark.parametrize(("rank", "local_rank", "says"), [(0, "0", 1), (1, "1", 0), (3, "0", 0)])
def test_of_a_hold_that_begins_the_one_rank_speaks_that_sends_the_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, local_rank: str, says: int
) -> None:
    reporter = EventReporter(identity(rank), RUN, Outbox(tmp_path), None)
    settings = HoldSettings(timeout_seconds=0.1)
    with pytest.raises(SystemExit):
        report_sdc(an_alarm(run=RUN), reporter=reporter, settings=settings, environ={"LOCAL_RANK": local_rank})
    out = capsys.readouterr().out
    assert out.count("truestep: holding") == says
    assert out.count("for 0 s") == 0
    assert out.count("nobody stopped the job") == (local_rank == "0")


def test_a_hold_line_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(HoldSettingError, match="its fields are alarm_id"):
        HoldSettings.from_environment({"TRUESTEP_HOLD_LINE": "{nonsense}"})


HOLDING = """
import json, sys
from truestep.contract import Alarm
from truestep.report import HoldSettings, report_sdc
report_sdc(Alarm.from_json(json.loads(sys.stdin.read())), settings=HoldSettings(timeout_seconds=float(sys.argv[1]),
    line_every_seconds=0.2, takeover_seconds=0.5, line="training_loss_step: held {held_seconds:.1f} s; {outbox}"))
"""


def holding(
    alarm: Alarm,
    timeout_seconds: float,
    *,
    stdout: IO[str] | int = subprocess.PIPE,
    stderr: IO[str] | None = None,
    **environ: str,
) -> subprocess.Popen[str]:
    source = str(Path(truestep.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(timeout_seconds)],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": source, **environ},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(alarm.to_json()))
    process.stdin.close()
    return process


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not printed, but {lines}")


def test_the_hold_sends_the_alarm_leaves_a_tombstone_speaks_and_ends_at_sigterm(bus: Bus, tmp_path: Path) -> None:
    alarm = an_alarm(run=dataclasses.replace(RUN, checkpoint_root=(tmp_path / "checkpoints").as_uri()))
    with holding(
        alarm, 60, RANK="0", TRUESTEP_EVENT_BUS=bus.name, TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox")
    ) as process:
        lines = lines_until(process, "training_loss_step")
        assert "SILENT DATA CORRUPTION" in lines[0]
        assert "the alarm was accepted" in lines[-1]
        lines_until(process, "training_loss_step")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_STOPPED == 143
        process.stdout.close() if process.stdout else None
    assert [event["detail"]["alarm_id"] for event in bus.received()] == [alarm.alarm_id]
    tombstone = json.loads((tmp_path / "checkpoints" / "tombstone.json").read_text())
    assert (tombstone["alarm_id"], tombstone["step"], tombstone["at"]) == (alarm.alarm_id, 29, alarm.detected_at)


def test_a_ctrl_c_and_a_second_one_end_the_hold_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    alarm, errors = an_alarm(run=RUN), tmp_path / "stderr.txt"
    environ = {"RANK": "0", "TRUESTEP_OUTBOX_DIR": str(tmp_path / "outbox"), "TRUESTEP_EVENT_BUS": ""}
    with errors.open("w") as stderr, holding(alarm, 60, stderr=stderr, **environ) as process:
        lines_until(process, "training_loss_step")
        process.send_signal(signal.SIGINT)
        said = lines_until(process, "interrupted")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == EXIT_INTERRUPTED == 130
        after = process.stdout.read() if process.stdout else ""
    assert said[-1] == "truestep: interrupted (Ctrl-C); the job ends with exit code 130"
    assert after == ""
    assert "Traceback" not in errors.read_text()
    assert "Exception ignored" not in errors.read_text()


def test_a_hold_that_nobody_ends_leaves_with_its_own_exit_code(tmp_path: Path) -> None:
    alarm = an_alarm(run=dataclasses.replace(RUN, checkpoint_root=(tmp_path / "checkpoints").as_uri()))
    with holding(alarm, 0.5, RANK="3", TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox"), TRUESTEP_EVENT_BUS="") as process:
        output = process.stdout.read() if process.stdout else ""
        assert process.wait(30) == EXIT_HOLD_EXPIRED == 76
    assert "nobody stopped the job" in output
    assert "SILENT" not in output, "one rank prints the box"


def test_another_rank_takes_over_when_the_first_one_never_sends(bus: Bus, tmp_path: Path) -> None:
    alarm = an_alarm(run=RUN)
    assert reporting_ranks(alarm, 1)[1] == 1
    with holding(
        alarm, 60, RANK="1", TRUESTEP_EVENT_BUS=bus.name, TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox")
    ) as process:
        lines = lines_until(process, "the alarm was accepted")
        assert any("not accepted yet" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_STOPPED
    assert len(bus.received()) == 1


def test_the_hold_goes_on_trying_to_send(bus: Bus, tmp_path: Path, aws: str) -> None:
    """The bus does not exist when the hold begins; each line is another occasion to send."""
    alarm, name = an_alarm(run=RUN), f"late-{uuid.uuid4().hex[:8]}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with holding(
        alarm,
        120,
        RANK="0",
        TRUESTEP_EVENT_BUS=name,
        TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox"),
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
    ) as process:
        lines_until(process, "not accepted yet")
        server = ThreadedMotoServer(port=port, verbose=False)
        server.start()
        boto3.client("events", endpoint_url=f"http://127.0.0.1:{port}").create_event_bus(Name=name)
        lines_until(process, "the alarm was accepted")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_STOPPED
        server.stop()


def test_an_outbox_that_cannot_be_searched_neither_silences_the_alarm_nor_ends_the_hold(
    bus: Bus, tmp_path: Path
) -> None:
    """A name too long for the file system fails like a directory of another user, for root as well."""
    alarm = an_alarm(run=dataclasses.replace(RUN, checkpoint_root=(tmp_path / "checkpoints").as_uri()))
    with holding(
        alarm, 60, RANK="0", TRUESTEP_EVENT_BUS=bus.name, TRUESTEP_OUTBOX_DIR=str(tmp_path / ("x" * 300))
    ) as process:
        lines_until(process, "the alarm was accepted")
        lines_until(process, "the alarm was accepted")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_STOPPED
    assert [event["detail"]["alarm_id"] for event in bus.received()] == [alarm.alarm_id], "sent once, from memory"
    assert (tmp_path / "checkpoints" / "tombstone.json").exists()


def test_a_standard_output_that_is_full_does_not_silence_the_alarm_nor_end_the_hold(bus: Bus, tmp_path: Path) -> None:
    alarm = an_alarm(run=RUN)
    with (
        Path("/dev/full").open("w") as full,
        holding(
            alarm,
            60,
            stdout=full,
            RANK="0",
            TRUESTEP_EVENT_BUS=bus.name,
            TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox"),
        ) as process,
    ):
        deadline = time.monotonic() + 60
        while not (received := bus.received()):
            assert process.poll() is None, "the hold ended"
            assert time.monotonic() < deadline, "the alarm was not sent"
            time.sleep(0.1)
        assert received[0]["detail"]["alarm_id"] == alarm.alarm_id
        time.sleep(0.5)  # a few lines of the hold
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_STOPPED, "neither ended by the output nor by Python's own flush of it"


def test_report_sdc_in_a_thread_still_ends_at_its_timeout(tmp_path: Path) -> None:
    reporter = EventReporter(identity(), RUN, Outbox(tmp_path), None)
    codes: list[object] = []

    def hold() -> None:
        try:
            report_sdc(an_alarm(run=RUN), reporter=reporter, settings=HoldSettings(timeout_seconds=0.1))
        except SystemExit as end:
            codes.append(end.code)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join(30)
    assert codes == [EXIT_HOLD_EXPIRED]


def test_without_credentials_nobody_waits_and_the_reason_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bus, retry = EventBus("bus", region="us-east-1"), RetryPolicy(attempts=5, base_seconds=0.01)
    reporter = EventReporter(identity(), RUN, Outbox(tmp_path / "outbox"), bus, retry=retry, alarm_wait_seconds=300)
    start, alarm = time.monotonic(), an_alarm(run=RUN)
    for _ in range(2):
        reporter.alarm(alarm)
    assert time.monotonic() - start < 60
    assert not reporter.flush(0.5)
    (said,) = caplog.messages
    assert "Unable to locate credentials; give the pod" in said
    assert str(tmp_path / "outbox") in said
    assert len(reporter.outbox.pending()) == 1
    reporter.close(0.1)


def test_the_box_is_there_before_anybody_waits_for_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_EVENTBRIDGE", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    order: list[str] = []
    monkeypatch.setattr(hold, "_say", lambda text: order.append(text))
    reporter = EventReporter(
        identity(), RUN, Outbox(tmp_path), EventBus("bus", region="us-east-1"), alarm_wait_seconds=300
    )
    flush = reporter.flush
    monkeypatch.setattr(reporter, "flush", lambda seconds: order.append("waits") or flush(seconds))
    start = time.monotonic()
    with pytest.raises(SystemExit):
        report_sdc(an_alarm(run=RUN), reporter=reporter, settings=HoldSettings(timeout_seconds=0.1))
    assert time.monotonic() - start < 60
    assert "SILENT DATA CORRUPTION" in order[0]
    assert order[1] == "waits"
    assert "not accepted yet" in order[2]
    reporter.close(0.1)


NOBODY_ACCUSED = [VerdictKind.INPUTS, VerdictKind.NUMERICS, VerdictKind.NONDETERMINISTIC]


@pytest.mark.parametrize("kind", NOBODY_ACCUSED)
def test_an_alarm_that_accuses_nobody_is_kept_and_ends_the_job_without_a_tombstone(
    kind: VerdictKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No recovery follows it: a hold would never end, and a tombstone would refuse every restart."""
    run = dataclasses.replace(RUN, checkpoint_root=(tmp_path / "checkpoints").as_uri())
    reporter, alarm = EventReporter(identity(), run, Outbox(tmp_path / "outbox"), None), accusing_nobody(kind, run=run)
    with pytest.raises(SystemExit) as end:
        report_sdc(alarm, reporter=reporter, settings=HoldSettings(timeout_seconds=60))
    assert end.value.code == EXIT_NOBODY_ACCUSED == 78
    assert [entry.event_id for entry in reporter.outbox.pending()] == [alarm.alarm_id]
    assert not (tmp_path / "checkpoints" / "tombstone.json").exists()
    said = " ".join(capsys.readouterr().out.replace("┃", " ").split())
    assert "exit code 78. To do: " in said
    assert "tombstone" not in said


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_alarm_that_accuses_nobody_is_on_the_bus_before_the_job_ends(bus: Bus, tmp_path: Path, rank: str) -> None:
    """Rank 0 sends it; where rank 0 never does, rank 1 does."""
    alarm = accusing_nobody(VerdictKind.NUMERICS, run=RUN)
    with holding(
        alarm, 600, RANK=rank, TRUESTEP_EVENT_BUS=bus.name, TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox")
    ) as process:
        assert process.wait(60) == EXIT_NOBODY_ACCUSED
        process.stdout.close() if process.stdout else None
    assert [event["detail"]["verdict"]["kind"] for event in bus.received()] == ["numerics"]


def test_waiting_for_an_alarm_that_accuses_nobody_is_bounded(tmp_path: Path) -> None:
    """Nobody ever sends it here; a rank that sends none itself ends all the same."""
    reporter = EventReporter(identity(3), RUN, Outbox(tmp_path), EventBus("never-used"))
    settings = HoldSettings(timeout_seconds=600, takeover_seconds=0.1)
    start = time.monotonic()
    with pytest.raises(SystemExit) as end:
        report_sdc(accusing_nobody(VerdictKind.INPUTS, run=RUN), reporter=reporter, settings=settings)
    assert end.value.code == EXIT_NOBODY_ACCUSED
    assert 0.3 <= time.monotonic() - start < 60, "waited until no other rank could have been left to send it"


def test_a_bus_name_that_cannot_be_used_does_not_end_the_hold(tmp_path: Path) -> None:
    alarm = an_alarm(run=dataclasses.replace(RUN, checkpoint_root=(tmp_path / "checkpoints").as_uri()))
    with holding(
        alarm, 0.5, RANK="3", TRUESTEP_EVENT_BUS="arn:aws", TRUESTEP_OUTBOX_DIR=str(tmp_path / "outbox")
    ) as process:
        lines_until(process, "the alarm is not accepted yet")
        assert process.wait(30) == EXIT_HOLD_EXPIRED
        process.stdout.close() if process.stdout else None
