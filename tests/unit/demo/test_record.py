"""The README's picture: what it shows, and what it must not hold."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest

from demo.record import PICTURE, RecordedView
from demo.stage import REPOSITORY


def words(picture: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", picture[picture.index("</defs>") :])).replace("\xa0", " ")


def recorded() -> str:
    view = RecordedView()
    with view:
        view.chapter("2  Before")
        view.steps("gpt", step=9, total=60, loss=2.5)
        view.chapter("3  One GPU starts to return wrong numbers")
        view.steps("gpt", step=19, total=60, loss=2.5)
        view.line(f"the page is kept in {REPOSITORY}/.local/demo/approval.html")
    return view.picture()


def test_the_picture_begins_with_the_fault_and_has_no_progress() -> None:
    text = words(recorded())
    assert "make demo APPROVE=auto" in text
    assert "One GPU starts" in text
    assert "kept in .local/demo/approval.html" in text
    assert not re.findall(r"Before|loss|step \d", text)


@pytest.mark.parametrize("picture", [recorded, PICTURE.read_text], ids=["new", "kept"])
def test_a_picture_loads_nothing_and_names_no_place_of_the_machine(picture: Callable[[], str]) -> None:
    drawn = picture()
    assert re.findall(r"https?://[^\"<\s]+", drawn) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in drawn
    assert str(REPOSITORY) not in drawn
