"""Counts in messages read as sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from truestep.contract.words import as_sentence, counted, plainly

REPOSITORY = Path(__file__).parents[2]
SPEAKING = ("trainer_sdk/src", "lambdas", "infra", "demo", "benchmarks", "state_machines", "docs")


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("pod",), "0 pods"),
        (1, ("pod",), "1 pod"),
        (12_000, ("step",), "12,000 steps"),
        (1, ("entry", "entries"), "1 entry"),
        (2, ("entry", "entries"), "2 entries"),
    ],
)
def test_one_is_singular_and_everything_else_is_plural(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


def test_a_status_and_a_clause_are_said_as_people_do() -> None:
    assert plainly("awaiting_approval") == "awaiting approval"
    texts = ("", "it was changed", " Done! ", "node-1 differs", "s3://b/k: gone", "no: none")
    assert [as_sentence(text) for text in texts] == [
        "",
        "It was changed.",
        "Done!",
        "node-1 differs.",
        "s3://b/k: gone.",
        "No: none.",
    ]


def test_no_message_leaves_the_number_open() -> None:
    """``1 GPU(s)``. The local stack is not looked at: its scheduler speaks as Kubernetes does."""
    files = [
        path for place in SPEAKING for path in (REPOSITORY / place).rglob("*") if path.suffix in (".py", ".html", ".md")
    ]
    assert files
    found = [str(path) for path in files if re.search(r"[a-z]\((s|es)\)[^.\w]", path.read_text())]
    assert found == []
