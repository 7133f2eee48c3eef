"""What is printed can be read on a narrow terminal and copied from any."""

from __future__ import annotations

import pytest

from truestep.cli.output import Meter, awaited, print_table, reading

LONG = "s3://bucket/a-run-with-a-name-that-is-longer-than-any-terminal/step-00000009"
COLUMNS = [("incident", "whole"), ("written (UTC)", "whole"), ("detection in steps", "right"), ("what", "left")]
ROW = ["inc-0123456789abcdef", "2026-03-01 02:29", "1,234,567", "a sentence of several words"]


@pytest.mark.parametrize("width", [24, 40, 60, 72, 80, 120])
def test_a_table_never_breaks_a_word_and_never_passes_the_terminals_edge(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(LONG, COLUMNS, [ROW, ROW])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == LONG
    assert max(len(line.rstrip()) for line in lines) <= width
    words = " ".join(lines).split()
    for cell in ROW:
        assert all(words.count(word) >= 2 for word in cell.split()), cell


def test_a_word_longer_than_the_terminal_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table("", [("checkpoint", "whole"), ("trust", "left")], [[LONG, "trusted"]])
    assert capsys.readouterr().out.splitlines() == [LONG, "  trust: trusted"]


def test_what_shows_progress_writes_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    read = Meter()
    with reading("step-00000009", 10) as read.advance:
        read(10)
    assert list(awaited(iter([1, 2]), "following")) == [1, 2]
    assert capsys.readouterr() == ("", "")
