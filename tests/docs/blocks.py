"""The code blocks of the documentation: fenced ones with their language, and the command lines of all."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), REPOSITORY / "README.md", REPOSITORY / "trainer_sdk" / "README.md"])
LANGUAGES = {"python", "sh", "json", "yaml", "text", ""}
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_COMMAND = re.compile(r"^(?:\$ )?((?:truestep|make|python -m|\.venv/bin/python -m) [^#\n]*)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """All fenced blocks of a language, in order."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 2, match["language"], textwrap.dedent(match["text"]))
        for match in _FENCE.finditer(text)
    ]


def runs_on_ranks(page: Path) -> bool:
    """Whether the page says in its front matter that its program runs on several ranks."""
    return page.read_text(encoding="utf-8").startswith("---\nranks: 3\n---\n")


def commands() -> list[tuple[str, str]]:
    """(where, command line) of everything on all pages that a reader can type: fenced, indented or in the text."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{page.relative_to(REPOSITORY)}:{number}"
            typed = [_COMMAND.match(line.strip())] if line.startswith("    ") else []
            typed += [_COMMAND.match(code) for code in re.findall(r"`([^`]+)`", line)]
            found += [(where, match[1].strip()) for match in typed if match]
    for block in blocks("sh"):
        lines = block.text.splitlines()
        found += [(str(block), match[1].strip()) for match in map(_COMMAND.match, lines) if match]
    return found
