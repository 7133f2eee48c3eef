"""What every command prints with: tables and sentences for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from truestep.contract.codec import to_json


def print_json(document: Any) -> None:
    """Print dataclasses or plain values as one JSON document on standard output."""
    sys.stdout.write(json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def say(text: str, *, style: str = "") -> None:
    """Print a sentence on standard output, wrapped to the terminal, taken literally."""
    Console(highlight=False).print(Text(text, style=style))


def say_whole(text: str) -> None:
    """Print a line that is to be copied: never wrapped."""
    Console(highlight=False).print(Text(text), soft_wrap=True)


def complain(text: str) -> None:
    """Print an error on standard error, wrapped to the terminal, taken literally."""
    Console(stderr=True, highlight=False).print(Text.assemble(("truestep: ", "bold red"), text))


def print_table(title: str, columns: list[tuple[str, str]], rows: list[list[str]]) -> None:
    """Print a table. columns: (heading, ``left`` or ``right``); cells are folded, never cut, so nothing is lost."""
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for heading, justify in columns:
        table.add_column(Text(heading), justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)
