"""What the demo says when a person rejects, and that what it prints can be copied."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import demo.__main__ as entry
from demo import approval
from demo.incident_watch import approved
from demo.settings import DemoSettings
from demo.stage import RejectedError
from demo.view import View
from lambdas.domain.approval import asked, decided
from lambdas.domain.incident import Incident, open_incident
from lambdas.domain.outcome import Outcome
from lambdas.domain.policy import Policy
from tests.unit.recovery.alarms import NOW, an_alarm

PATH = "s3://training-checkpoints-of-the-demo/gpt/step-00000000000000000019/manifest.json"


def answered(*, approve: bool) -> Incident:
    opened = open_incident(an_alarm(), now=NOW, dry_run=False)
    question = asked(opened, task_token="t", now=NOW, policy=Policy())
    return decided(question, approve=approve, by="x", comment="why", now=NOW)


def test_a_rejection_ends_the_story_once_the_recovery_has_given_the_node_back() -> None:
    assert approved(answered(approve=True))
    rejected = answered(approve=False)
    assert not approved(rejected)
    for outcome in (Outcome.RELEASED, Outcome.LEFT_ALONE):
        given_back = rejected.noted(at=NOW, state="ReleaseNode", outcome=str(outcome), reason="")
        with pytest.raises(RejectedError):
            approved(given_back)


def test_a_rejection_is_no_failure_of_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rejected(_settings: DemoSettings, _view: View) -> int:
        raise RejectedError

    monkeypatch.setattr(entry, "tell", rejected)
    monkeypatch.setattr("sys.argv", ["demo"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert entry.main() == 1
    out = capsys.readouterr().out
    assert "failed" not in out
    assert "Rejected" in out
    assert "node is released" in out
    assert "SCENARIO=reject" in out


def test_a_path_that_is_longer_than_the_line_is_wrapped_and_not_cut() -> None:
    written = io.StringIO()
    view = View(Console(file=written, width=50, highlight=False))
    view.line(f"ChooseCheckpoint: chosen. {PATH}")
    view.facts("Incident", {"checkpoint": PATH})
    assert "…" not in written.getvalue()
    assert "".join(written.getvalue().split()).count(PATH) == 2


def test_the_form_is_sent_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def opened(_url: str, body: bytes | None = None) -> str:
        sent.extend([body] if body else [])
        return '<form action="x"><textarea name="comment"></textarea><button name="decision" value="reject"></form>'

    monkeypatch.setattr(approval, "_open", opened)
    approval.follow("http://127.0.0.1:1/incidents/i", decision="reject", comment="not believed")
    assert sent == [b"decision=reject&comment=not+believed"]
