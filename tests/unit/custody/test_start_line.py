"""What a training says when it starts, and where its alarm's box sends people."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from truestep.contract import NodeName, Rank
from truestep.plan import Workload, make_plan
from truestep.report.start import announce_start, start_text
from truestep.report.text import RUNBOOK_SECTION
from truestep.schedule import Schedule

NODES = {Rank(rank): NodeName(f"node-{rank // 2}") for rank in range(4)}


def test_the_line_says_what_is_checked_how_often_and_what_it_costs() -> None:
    text = start_text(NODES, Schedule(audit_every=50, check_every=10, checkpoint_every=200), "loss and gradients")
    for part in (
        "4 ranks on 2 nodes",
        "non-finite gradients every step",
        "audits of loss and gradients every 50 steps",
        "weights every 10",
        "every save (every 200)",
        "about 2% of the time",
    ):
        assert part in text
    assert "\n" not in text


def test_the_cost_is_the_one_that_plan_computes() -> None:
    plan = make_plan(Workload(gpus=64, step_seconds=2.0))
    text = start_text(NODES, Schedule(audit_every=plan.audit_every, check_every=plan.check_every), "loss")
    share = plan.waste.audit_share + plan.waste.check_share
    assert f"about {100 * share:.2g}%" in text


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(audit_every=None), "no audits: nothing"),
        (Schedule(audit_every=[3, 5]), "on chosen steps"),
        (Schedule(audit_every=lambda step: step == 3), "on chosen steps"),
    ],
)
def test_schedules_without_a_period_are_said_as_they_are(schedule: Schedule, words: str) -> None:
    coverage = "no audits: nothing" if schedule.audit_every is None else "loss and gradients"
    assert words in start_text(NODES, schedule, coverage)


def test_one_rank_says_it_to_the_log_or_to_standard_error_where_there_is_no_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(audit_every=10)
    caplog.set_level(logging.INFO, "truestep")
    announce_start(Rank(1), NODES, schedule, "loss")
    announce_start(Rank(0), NODES, schedule, "loss")
    assert [record.getMessage()[:17] for record in caplog.records] == ["truestep: watchin"]
    assert capsys.readouterr().err == ""
    for name in (None, "truestep"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    announce_start(Rank(0), NODES, schedule, "loss")
    assert capsys.readouterr().err.startswith("truestep: watching 4 ranks")


def test_the_boxs_section_is_in_the_runbook() -> None:
    runbook = Path(__file__).parents[3] / "docs" / "runbook.md"
    assert f"\n## {RUNBOOK_SECTION}\n" in runbook.read_text(encoding="utf-8")
