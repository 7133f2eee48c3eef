"""What every command prints with: tables and sentences for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from truestep.contract.codec import to_json

_NAME = "truestep"


def print_json(document: Any) -> None:
    """Print dataclasses or plain values as one JSON document on standard output."""
    sys.stdout.write(json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def working(text: str) -> Iterator[None]:
    """Say on a terminal what takes its time, until the block ends."""
    console = Console(stderr=True, highlight=False)
    with console.status(Text(text)) if console.is_terminal else nullcontext():
        yield


def say(text: str, *, style: str = "") -> None:
    """Print a sentence on standard output, wrapped between words to the terminal; leading spaces indent all of it."""
    console = Console(highlight=False)
    console.print(Text(_wrapped(text, console.width), style=style), soft_wrap=True)


def say_whole(text: str) -> None:
    """Print a line that is to be copied: never wrapped."""
    Console(highlight=False).print(Text(text), soft_wrap=True)


def complain(text: str) -> None:
    """Print an error on standard error, wrapped between words to the terminal."""
    console = Console(stderr=True, highlight=False)
    message = Text(_wrapped(f"{_NAME}: {text}", console.width))
    message.stylize("bold red", 0, len(_NAME) + 1)
    console.print(message, soft_wrap=True)


def _wrapped(text: str, width: int) -> str:
    """Never inside a word: a URI that does not fit stays whole, so that it can be copied."""
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(
        text.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_table(title: str, columns: list[tuple[str, str]], rows: list[list[str]]) -> None:
    """Print a table. columns: (heading, ``left``, ``right``, or ``whole``: left and on one line); cells are
    folded, never cut, so nothing is lost."""
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for heading, justify in columns:
        side: Literal["left", "right"] = "right" if justify == "right" else "left"
        table.add_column(Text(heading), justify=side, overflow="fold", no_wrap=justify == "whole")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)
