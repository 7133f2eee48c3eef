"""What a person reads first: an accusation is called one, a mistake in the program is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.custody.events import RUN, accusing_nobody, an_alarm, identity
from truestep.contract import Rank, Verdict, VerdictCause, VerdictKind
from truestep.contract.alarm import NODES_OF_RUN
from truestep.judge import AuditEvidence, Recorded, Replayed, judge_audit
from truestep.report import EventBus, EventReporter, HoldSettings, Outbox, report_sdc
from truestep.report.text import ACCUSING, alarm_text

GOLDEN_CHECKPOINT = "s3://checkpoints/gpt-2026-11/step-00000019"


@pytest.mark.parametrize("kind", [kind for kind in VerdictKind if kind not in ACCUSING])
def test_an_alarm_that_accuses_nobody_does_not_say_corruption_and_says_what_to_do(kind: VerdictKind) -> None:
    first, *rest = alarm_text(accusing_nobody(kind)).splitlines()
    assert "CORRUPTION" not in first
    assert "nobody is accused" in first
    assert any("To do:" in line for line in rest)
    assert {len(line) for line in rest} == {len(first)}


def test_an_accusation_is_called_corruption() -> None:
    assert "SILENT DATA CORRUPTION" in alarm_text(an_alarm()).splitlines()[0]


def test_without_a_bus_the_box_promises_no_recovery_and_says_the_steps_by_hand() -> None:
    alarm = an_alarm()
    text = alarm_text(alarm, has_bus=False)
    flat = re.sub(r"[\s┃]+", " ", text)
    assert "No event bus is set" in flat
    assert "asks for approval" not in flat
    assert f"kubectl cordon {alarm.suspects[0].node_name}" in flat
    assert f"truestep checkpoints start-from {GOLDEN_CHECKPOINT} 3. start the job again" in flat
    untrusted = re.sub(r"[\s┃]+", " ", alarm_text(an_alarm(checkpoint=None), has_bus=False))
    assert "aws s3 rm s3://checkpoints/gpt-2026-11/tombstone.json" in untrusted
    assert "start-from" not in untrusted
    local = alarm_text(an_alarm(checkpoint=None), has_bus=False, checkpoint_root="file:///fsx/my%20run")
    assert "rm '/fsx/my run/tombstone.json'" in local


def test_where_every_rank_is_on_one_node_the_box_names_the_variable_and_cordons_nothing() -> None:
    row = an_alarm().suspects[0]
    recorded = {Rank(r): Recorded(rank=Rank(r), node=row.node_name, inputs="in", result="right") for r in range(3)}
    odd = Replayed(producer=Rank(0), replayer=Rank(1), inputs="in", result="wrong")
    verdict = judge_audit(AuditEvidence(recorded=recorded, ring=[odd]))
    assert verdict is not None
    assert verdict.kind is VerdictKind.AMBIGUOUS
    assert f"every rank says that it is on node {row.node_name}. Where that is not so, set NODE_NAME" in verdict.settle
    rows = tuple(replace(row, rank=rank) for rank in verdict.suspects)
    for nodes, cordons in ((1, False), (2, True)):
        alarm = an_alarm(verdict=verdict, suspects=rows, evidence={NODES_OF_RUN: nodes})
        flat = re.sub(r"[\s┃]+", " ", alarm_text(alarm, has_bus=False))
        assert ("kubectl cordon" in flat) is cordons
        assert (f"1. stop the job. Every rank says that it is on {row.node_name}." in flat) is not cordons


AMBIGUOUS = Verdict(kind=VerdictKind.AMBIGUOUS, reason="two differ", settle="a third node", suspects=(Rank(0), Rank(2)))
NOBODY = Verdict(kind=VerdictKind.AMBIGUOUS, reason="the ranks drew different conclusions", settle="read the logs")


@pytest.mark.parametrize("hold_seconds", [0.0, 21600.0])
@pytest.mark.parametrize("has_bus", [True, False])
@pytest.mark.parametrize("where", ["trusted", "nothing trusted", "no store"])
@pytest.mark.parametrize("what", ["hardware", "ambiguous", "nobody", *(k for k in VerdictKind if k not in ACCUSING)])
def test_the_box_fits_80_columns_and_does_not_contradict_itself(
    what: str, where: str, has_bus: bool, hold_seconds: float
) -> None:
    alarm = an_alarm()
    if what == "hardware":
        alarm = replace(alarm, verdict=replace(alarm.verdict, cause=VerdictCause.HARDWARE))
    elif what == "ambiguous":
        alarm = replace(alarm, verdict=AMBIGUOUS, suspects=(alarm.witnesses[0], *alarm.suspects))
    else:
        verdict = NOBODY if what == "nobody" else accusing_nobody(VerdictKind(what)).verdict
        alarm = replace(alarm, verdict=verdict, suspects=())
    if where != "trusted":
        alarm = replace(alarm, checkpoint=None)
    if where == "no store":
        alarm = replace(alarm, run=replace(alarm.run, checkpoint_root=""))
    text = alarm_text(alarm, has_bus=has_bus, hold_seconds=hold_seconds)
    flat = re.sub(r"[\s┃]+", " ", text)
    commands = [line for line in text.splitlines() if re.match(r"┃ {7}\S", line)]
    assert {len(line) for line in text.splitlines() if line not in commands} == {80}
    accuses = alarm.verdict.kind in ACCUSING
    assert ("newest trusted checkpoint: step 19" in flat) is (where == "trusted")
    assert ("none yet below" in flat) is (where == "nothing trusted")
    assert ("tombstone.json" in flat) is (
        accuses and where != "no store" and (not hold_seconds or (not has_bus and where == "nothing trusted"))
    )
    assert ("the job holds, for 6 h at most" in flat) is (accuses and hold_seconds > 0)
    assert ("exit code 76" in flat, "exit code 78" in flat) == (accuses and not hold_seconds, not accuses)
    assert ("By hand:" in flat) is (accuses and not has_bus)
    assert ("kubectl cordon" in flat) is (not has_bus and bool(alarm.suspects))
    assert ("stop the job" in flat) is (accuses and not has_bus and hold_seconds > 0)
    for words, place in (("trusted checkpoint above", "trusted"), ("starts at step 0", "nothing trusted")):
        assert (words in flat) is (not accuses and where == place)


@pytest.mark.parametrize("name", ["", "bus"])
def test_the_box_of_a_hold_follows_the_setting_of_the_bus(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = EventBus(name, region="us-east-2") if name else None
    reporter = EventReporter(identity(), RUN, Outbox(tmp_path), bus, alarm_wait_seconds=0.01)
    reporter.alarm = lambda _alarm: None  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        report_sdc(an_alarm(), reporter=reporter, environ={}, settings=HoldSettings(timeout_seconds=0.01))
    assert ("No event bus is set" in capsys.readouterr().out) is not bool(name)


@pytest.mark.parametrize(
    ("other", "to_do"),
    [
        ("rebuild_batch(3, 0) gives another batch than the one trained on", "make rebuild_batch give the batch"),
        ("", "look for code that writes to the batch or to buffers"),
    ],
)
def test_a_verdict_on_inputs_says_which_ones_and_what_to_do(other: str, to_do: str) -> None:
    nodes: dict[Rank, Any] = {Rank(rank): f"node-{rank}" for rank in range(3)}
    recorded = {rank: Recorded(rank=rank, node=node, inputs="in", result="right") for rank, node in nodes.items()}
    odd = Replayed(producer=Rank(0), replayer=Rank(1), inputs="other", other_inputs=other, result="right")
    verdict = judge_audit(AuditEvidence(recorded=recorded, ring=[odd]))
    assert verdict is not None
    assert (verdict.kind, verdict.suspects) == (VerdictKind.INPUTS, ())
    assert other in verdict.reason
    assert "rank 1 could not start from what rank 0 started from" in verdict.reason
    assert to_do in verdict.settle
    flat = re.sub(r"[\s┃]+", " ", alarm_text(an_alarm(verdict=verdict, suspects=()), has_bus=False))
    assert "To do: let rebuild_batch(step, rank) give the very batch that the rank of this number trained on" in flat
    assert "same batch" not in flat, "in data-parallel training every rank has a batch of its own"
    assert "leave it out" not in flat, "an argument of train by position: it cannot be left out"


def test_reporting_no_alarm_at_all_says_what_to_write_instead() -> None:
    with pytest.raises(TypeError, match="if alarm is not None: report_sdc"):
        report_sdc(None)  # type: ignore[arg-type]
