"""The outbox and the event bus: nothing is lost, nothing raises, training never waits long."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import fastjsonschema
import pytest

from tests.unit.custody.events import RUN, Bus, an_alarm, identity
from truestep.contract import Alarm, CheckpointRef, DetailType, Step, schema, training_source
from truestep.protocols import ResumePoint
from truestep.report import (
    EventBus,
    EventReporter,
    HoldSettings,
    Outbox,
    RetryPolicy,
    alarm_text,
    hold,
    outbox,
    reporter_from_environment,
)
from truestep.report.event_bus import BATCH_BYTES, batches
from truestep.report.outbox import OutboxEntry
from truestep.report.reporter import IDENTITY_VARIABLES
from truestep.report.size import fitted

FINGERPRINT = "v1:" + "0" * 48
REF = CheckpointRef(uri="s3://bucket/run/step-00000019", step=Step(19), manifest_sha256="3" * 64)
FAST = RetryPolicy(attempts=3, base_seconds=0.01, cap_seconds=0.02)


@pytest.fixture
def bus(aws: str) -> Bus:
    return Bus.create()


@pytest.fixture
def dead_endpoint(aws: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A port that nobody listens on becomes the endpoint of every client that is made from now on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_EVENTBRIDGE", url)
    return url


def reporter_on(tmp_path: Path, name: str, *, rank: int = 0, wait: float = 10.0) -> EventReporter:
    outbox = Outbox(tmp_path / "outbox")
    return EventReporter(identity(rank), RUN, outbox, EventBus(name), retry=FAST, alarm_wait_seconds=wait)


def test_an_alarm_arrives_on_the_bus_as_the_schema_says_and_leaves_the_outbox(bus: Bus, tmp_path: Path) -> None:
    reporter, alarm = reporter_on(tmp_path, bus.name), an_alarm()
    reporter.alarm(alarm)
    (event,) = bus.received()
    assert event["source"] == training_source(alarm.run.cluster_arn, alarm.run.namespace)
    assert event["detail-type"] == DetailType.ALARM
    fastjsonschema.compile(schema(DetailType.ALARM))(event["detail"])
    assert Alarm.from_json(event["detail"]) == alarm
    assert reporter.outbox.pending() == []
    assert reporter.outbox.was_accepted(alarm.alarm_id)


def test_every_kind_of_event_arrives_in_order_and_matches_its_schema(bus: Bus, tmp_path: Path) -> None:
    reporter = reporter_on(tmp_path, bus.name)
    reporter.checkpoint_written(REF, FINGERPRINT)
    reporter.checkpoint_trusted(REF, FINGERPRINT, Step(20))
    point = ResumePoint(start_step=Step(20), checkpoint=REF, incident_id="inc-1", directive_sha256="4" * 64)
    reporter.resumed(point, ["node-b", "node-a", "node-b"])
    reporter.verified(point, Step(29))
    assert reporter.flush(30)
    events = bus.received()
    for event in events:
        fastjsonschema.compile(schema(DetailType(event["detail-type"])))(event["detail"])
    by_type = {event["detail-type"]: event["detail"] for event in events}
    assert len(by_type) == len(events) == 4
    assert by_type[DetailType.RESUMED]["nodes"] == by_type[DetailType.VERIFIED]["nodes"] == ["node-a", "node-b"]
    assert {by_type[kind]["directive_sha256"] for kind in (DetailType.RESUMED, DetailType.VERIFIED)} == {"4" * 64}
    assert (by_type[DetailType.RESUMED]["step"], by_type[DetailType.VERIFIED]["step"]) == (20, 29)


def test_with_a_dead_endpoint_nothing_raises_and_the_next_start_sends_it(
    bus: Bus, dead_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm = an_alarm()
    reporter = reporter_on(tmp_path, bus.name, wait=0.5)
    reporter.alarm(alarm)
    reporter.checkpoint_written(REF, FINGERPRINT)
    assert not reporter.flush(0.5)
    assert next(entry.event_id for entry in reporter.outbox.pending()) == alarm.alarm_id
    reporter.close(0.1)

    monkeypatch.delenv("AWS_ENDPOINT_URL_EVENTBRIDGE")
    restarted = reporter_on(tmp_path, bus.name)
    assert restarted.flush(30)
    assert {event["detail-type"] for event in bus.received()} == {DetailType.ALARM, DetailType.CHECKPOINT_WRITTEN}
    assert restarted.outbox.pending() == []


def test_the_waiting_of_an_alarm_is_bounded(dead_endpoint: str, tmp_path: Path) -> None:
    reporter = reporter_on(tmp_path, "bus", wait=0.3)
    start = time.monotonic()
    reporter.alarm(an_alarm())
    assert time.monotonic() - start < 5
    reporter.close(0.1)


def test_an_event_sent_by_another_rank_is_not_sent_again(bus: Bus, tmp_path: Path) -> None:
    alarm = an_alarm()
    reporter_on(tmp_path, bus.name, rank=1).alarm(alarm)
    reporter_on(tmp_path, bus.name, rank=2).alarm(alarm)
    assert len(bus.received()) == 1


def test_entries_that_one_call_cannot_take_go_out_in_several(bus: Bus, tmp_path: Path) -> None:
    reporter = reporter_on(tmp_path, bus.name)
    for step in range(23):
        ref = dataclasses.replace(REF, step=Step(step), manifest_sha256=f"{step:064x}")
        reporter.checkpoint_written(ref, FINGERPRINT)
    assert reporter.flush(30)
    assert sorted(event["detail"]["checkpoint"]["step"] for event in bus.received()) == list(range(23))
    entry = OutboxEntry(
        event_id="x", detail_type=DetailType.ALARM, detail={"text": "x" * (BATCH_BYTES // 2)}, created_at=""
    )
    assert [len(batch) for batch in batches([entry] * 3)] == [1, 1, 1]


def test_an_entry_of_another_place_keeps_no_alarm_of_this_run_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """IAM refuses a call as a whole for one entry whose source is not the pod's own."""
    sent: list[str] = []

    class OneSource:
        def put_events(self, Entries: list[dict[str, str]]) -> dict[str, object]:  # noqa: N803 - boto3's name
            (source,) = {entry["Source"] for entry in Entries}
            if source != training_source(RUN.cluster_arn, RUN.namespace):
                raise PermissionError(f"not authorized to perform events:PutEvents with {source}")
            sent.extend(entry["DetailType"] for entry in Entries)
            return {"Entries": [{"EventId": "1"} for _ in Entries]}

    bus = EventBus("bus")
    bus._client = OneSource()
    outbox = Outbox(tmp_path)
    elsewhere = dataclasses.replace(RUN, namespace="another")
    left = EventReporter(identity(), elsewhere, outbox, None)
    left.checkpoint_written(REF, FINGERPRINT)
    reporter = EventReporter(identity(), RUN, outbox, bus, retry=FAST)
    for _ in range(3):
        reporter.alarm(an_alarm(run=RUN))
    reporter.close(0.5)
    assert sent == [DetailType.ALARM] * 3
    (said,) = caplog.messages
    assert "truestep.training.abc123def456.another" in said
    assert [entry.detail["run"]["namespace"] for entry in outbox.pending()] == ["another"]


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"cluster_arn": ""}, "TRUESTEP_CLUSTER_ARN"),
        ({"cluster_arn": "training"}, "TRUESTEP_CLUSTER_ARN"),
        ({"namespace": ""}, "POD_NAMESPACE"),
        ({"namespace": "a.b"}, "POD_NAMESPACE"),
    ],
)
def test_an_alarm_of_no_place_is_kept_with_the_variable_to_set(
    change: dict[str, str], variable: str, tmp_path: Path
) -> None:
    run = dataclasses.replace(RUN, **change)
    reporter = EventReporter(identity(), run, Outbox(tmp_path), EventBus("bus"), retry=FAST, alarm_wait_seconds=5)
    alarm = an_alarm(run=run)
    reporter.alarm(alarm)
    assert reporter.outbox.pending() == []
    assert (tmp_path / "refused" / f"{alarm.alarm_id}.json").exists()
    reason = tmp_path / "refused" / f"{alarm.alarm_id}.reason.txt"
    assert f"set {variable}" in reason.read_text()
    assert str(reason) in hold._line(alarm, reporter, HoldSettings(), 60.0)


def test_a_place_that_cannot_report_is_said_when_training_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = dataclasses.replace(RUN, attempt_id="by name", cluster_arn="training")
    env = dict.fromkeys(IDENTITY_VARIABLES, "set") | {"TRUESTEP_OUTBOX_DIR": str(tmp_path), "TRUESTEP_EVENT_BUS": "bus"}
    reporter_from_environment(identity(), run, env)
    (message,) = caplog.messages
    assert "'training' is no HyperPod cluster's ARN: set TRUESTEP_CLUSTER_ARN" in message


def test_without_a_bus_everything_stays_in_the_outbox(tmp_path: Path) -> None:
    reporter = EventReporter(identity(), RUN, Outbox(tmp_path), None)
    alarm = an_alarm()
    reporter.alarm(alarm)
    assert not reporter.flush(0.1)
    assert [entry.event_id for entry in reporter.outbox.pending()] == [alarm.alarm_id]


def test_an_outbox_that_cannot_be_written_does_not_silence_the_alarm(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "outbox").write_text("a file where the directory should be")
    reporter, alarm = reporter_on(tmp_path, bus.name), an_alarm()
    reporter.alarm(alarm)
    assert [event["detail"]["alarm_id"] for event in bus.received()] == [alarm.alarm_id]


def test_an_entry_that_cannot_be_read_is_set_aside_and_the_others_go_out(bus: Bus, tmp_path: Path) -> None:
    pending = tmp_path / "outbox" / "pending"
    pending.mkdir(parents=True)
    (pending / "broken.json").write_text("{")
    reporter, alarm = reporter_on(tmp_path, bus.name), an_alarm()
    reporter.alarm(alarm)
    assert len(bus.received()) == 1
    assert (tmp_path / "outbox" / "refused" / "broken.json").exists()
    assert "Expecting" in (tmp_path / "outbox" / "refused" / "broken.reason.txt").read_text()


def test_evidence_that_is_too_large_or_not_json_never_keeps_the_alarm_back(bus: Bus, tmp_path: Path) -> None:
    row = an_alarm().suspects[0]
    evidence = {"huge": "x" * 1_000_000, "object": object(), "nan": float("nan")}
    alarm = an_alarm(evidence=evidence, witnesses=(row,) * 500)
    reporter = reporter_on(tmp_path, bus.name)
    reporter.alarm(alarm)
    (event,) = bus.received()
    fastjsonschema.compile(schema(DetailType.ALARM))(event["detail"])
    left_out = event["detail"]["evidence"]["evidence_left_out"]
    assert left_out["fields"] == ["huge", "nan", "object"]
    assert left_out["bytes"] > 1_000_000
    assert event["detail"]["evidence"]["witnesses_in_all"] == 500
    assert fitted(an_alarm(evidence={"loss": float("inf")})).evidence == {"loss": "inf"}


def test_where_the_bundle_is_stays_in_an_alarm_whose_evidence_is_too_large() -> None:
    place = {"bundle_failed": "not written within 60 s", "bundle_expected": "s3://elsewhere/bundles/a"}
    sent = fitted(an_alarm(evidence={**place, "huge": "x" * 1_000_000})).evidence
    assert {name: sent[name] for name in place} == place
    assert sent["evidence_left_out"]["fields"] == ["huge"]
    assert "bundle_uri" not in fitted(an_alarm(evidence={"bundle_uri": "x" * 1_000_000})).evidence


def test_retries_wait_longer_each_time_up_to_the_cap_and_differ_between_ranks() -> None:
    policy = RetryPolicy(attempts=8, base_seconds=0.2, cap_seconds=5.0)
    delays = [policy.delay_seconds(attempt, random.Random(1)) for attempt in range(1, 9)]  # noqa: S311
    assert all(0.1 * 2**n <= delay <= 0.2 * 2**n for n, delay in enumerate(delays[:4]))
    assert max(delays) <= 5.0
    assert policy.delay_seconds(3, random.Random("a/0")) != policy.delay_seconds(3, random.Random("a/1"))  # noqa: S311


def test_the_environment_gives_one_reporter_a_process(tmp_path: Path) -> None:
    env = {"TRUESTEP_OUTBOX_DIR": str(tmp_path), "TRUESTEP_EVENT_BUS": "arn:aws:events:us-east-2:1:event-bus/b"}
    first = reporter_from_environment(identity(), RUN, env)
    assert reporter_from_environment(identity(), RUN, env) is first
    assert first.bus is not None
    assert first.bus._region == "us-east-2"
    below_root = dataclasses.replace(RUN, checkpoint_root=tmp_path.as_uri())
    assert reporter_from_environment(identity(), below_root, {}).outbox.directory == tmp_path / "outbox"


ENDS = """
import dataclasses
from pathlib import Path
from tests.unit.custody.events import RUN, an_alarm, identity
from truestep.report import reporter_from_environment

run = dataclasses.replace(RUN, checkpoint_root="s3://bucket/run")
reporter = reporter_from_environment(identity(), run, {})
reporter.alarm(an_alarm(run=run))
(entry,) = reporter.outbox.pending()
print(reporter.outbox.directory)
"""


@pytest.mark.parametrize("settled", [True, False])
def test_a_temporary_outbox_is_left_behind_only_with_something_in_it(tmp_path: Path, settled: bool) -> None:
    settle = "(reporter.outbox._pending / f'{entry.event_id}.json').unlink()\n" if settled else ""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", ENDS + settle]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    directory = Path(ended.stdout.strip())
    assert directory.parent == tmp_path
    assert directory.exists() is not settled


def test_an_outbox_that_another_rank_removes_between_two_steps_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, entry = (
        Outbox(tmp_path / "outbox"),
        OutboxEntry(event_id="e-1", detail_type=DetailType.ALARM, detail={}, created_at="2026-11-20T03:00:00+00:00"),
    )
    write, removed = outbox._write_durably, []

    def removed_first(target: Path, content: bytes) -> None:
        if not removed:
            removed.append(target)
            box.remove_if_empty()
        write(target, content)

    monkeypatch.setattr(outbox, "_write_durably", removed_first)
    assert box.put(entry)
    assert box.pending() == [entry]
    box.remove_if_empty()
    assert box.pending() == [entry]


def test_the_text_names_gpu_node_reason_checkpoint_and_what_happens_next() -> None:
    text = alarm_text(an_alarm())
    flat = re.sub(r"[\s┃]+", " ", text)
    for part in (
        "step 29",
        "rank 2: GPU-00000000-0000-0000-0000-000000000002",
        "node hyperpod-i-0123456789abcde02",
        "both contradict",
        "step 19 s3://checkpoints/gpt-2026-11/step-00000019",
        "asks for approval",
    ):
        assert part in flat, part
    assert len({len(line) for line in text.splitlines()}) == 1, "the box has a straight right edge"
