"""What every command prints with: tables and sentences for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from truestep.contract.codec import to_json

T = TypeVar("T")

_NAME = "truestep"
_GAP = 2
"""Columns between two columns of a table."""


def print_json(document: Any) -> None:
    """Print dataclasses or plain values as one JSON document on standard output."""
    sys.stdout.write(json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def working(text: str) -> Iterator[None]:
    """Say on a terminal what takes its time, and for how long it has, until the block ends."""
    with _shown(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()) as progress:
        progress.add_task(text, total=None)
        yield


class Meter:
    """Takes the bytes that a storage reads from when it is made, and passes them on to the bar that is shown."""

    def __init__(self) -> None:
        self.advance: Callable[[int], object] = lambda _: None

    def __call__(self, count_bytes: int) -> None:
        self.advance(count_bytes)


@contextmanager
def reading(text: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal until the block ends. What it gives is to be called with the bytes of each piece."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _shown(*columns) as progress:
        task = progress.add_task(text, total=total_bytes)
        yield lambda count_bytes: progress.advance(task, count_bytes)


def awaited(items: Iterable[T], text: str) -> Iterator[T]:
    """The items; while the next one is waited for, a terminal says so."""
    remaining = iter(items)
    nothing = object()
    while True:
        with working(text):
            item = next(remaining, nothing)
        if item is nothing:
            return
        yield item  # type: ignore[misc]


@contextmanager
def _shown(*columns: ProgressColumn) -> Iterator[Progress]:
    """A display on standard error that is gone at the end. It takes nothing of what is printed meanwhile."""
    console = Console(stderr=True, highlight=False)
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        yield progress


def say(text: str, *, style: str = "") -> None:
    """Print a sentence on standard output, wrapped between words to the terminal; leading spaces indent all of it."""
    console = Console(highlight=False)
    console.print(Text(_wrapped(text, console.width), style=style), soft_wrap=True)


def say_whole(text: str, *, style: str = "") -> None:
    """Print a line that is to be copied: never wrapped."""
    Console(highlight=False).print(Text(text, style=style), soft_wrap=True)


def complain(text: str) -> None:
    """Print an error on standard error, wrapped between words to the terminal."""
    console = Console(stderr=True, highlight=False)
    message = Text(_wrapped(f"{_NAME}: {text}", console.width))
    message.stylize("bold red", 0, len(_NAME) + 1)
    console.print(message, soft_wrap=True)


def moment(iso: str) -> str:
    """``2026-03-01 02:29:58 UTC`` of a time as records hold it; what is no such time stays as it is."""
    return f"{iso[:10]} {iso[11:19]} UTC" if len(iso) >= 19 and iso[10] == "T" else iso


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
    """Print a table under a title that is never wrapped. Where a word would be broken, print a paragraph a row instead.

    columns: (heading, ``left``, ``right``, or ``whole``: left and on one line). What a cell holds stays whole, so that
    an identifier can be copied.
    """
    console = Console(highlight=False)
    if title:
        say_whole(title, style="bold")
    if _narrowest(columns, rows) > console.width:
        stacked = [(heading.replace(" ", "\n"), justify) for heading, justify in columns]
        if _narrowest(stacked, rows) > console.width:
            for row in rows:
                _print_paragraph(columns, row)
            return
        columns = stacked
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for heading, justify in columns:
        side: Literal["left", "right"] = "right" if justify == "right" else "left"
        table.add_column(Text(heading), justify=side, overflow="fold", no_wrap=justify != "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _narrowest(columns: list[tuple[str, str]], rows: list[list[str]]) -> int:
    """Columns of a terminal that the table takes when every cell that may be wrapped is, between words."""
    width = _GAP * (len(columns) - 1)
    for index, (heading, justify) in enumerate(columns):
        cells = (row[index] for row in rows)
        parts = [part for cell in cells for part in (cell.split() if justify == "left" else [cell])]
        parts += heading.splitlines()
        width += max(map(len, parts), default=0)
    return width


def _print_paragraph(columns: list[tuple[str, str]], row: list[str]) -> None:
    """The first cell, and below it the others with their headings."""
    say_whole(row[0].strip(), style="bold")
    for (heading, _), cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            say(f"  {heading}: {cell}" if heading else f"  {cell}")
