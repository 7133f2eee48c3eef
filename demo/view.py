"""What a person sees: a timeline that scrolls, one progress bar below it, panels for what matters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text


class View:
    """Prints the story. Use as a context manager; everything goes through one console, so lines never tear."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._started = self._last_news = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
            refresh_per_second=4,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> View:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stop_progress(self) -> None:
        """Take the bars away for good; lines can still be printed."""
        self._progress.stop()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def quiet_seconds(self) -> float:
        """Time since anything was shown."""
        return time.monotonic() - self._last_news

    def nothing_yet(self) -> None:
        """Count the silence from now."""
        self._last_news = time.monotonic()

    def chapter(self, title: str) -> None:
        """Start a part of the story."""
        self.console.print()
        self.console.rule(Text(title, style="bold"), align="left")

    def line(self, text: str, *, style: str = "") -> None:
        """One thing that happened, with the time since the start."""
        self.nothing_yet()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        # Rich cuts a word that is longer than the line, and a path that is cut cannot be copied.
        grid.add_column(overflow="fold")
        grid.add_row(Text(f"{self.elapsed_seconds:7.1f}s", style="dim"), Text(text, style=style))
        self.console.print(grid)

    def to_copy(self, text: str) -> None:
        """One unbroken line, however narrow the terminal: for what people copy."""
        self.console.print(Text(text), soft_wrap=True)

    def steps(self, job: str, *, step: int, total: int, loss: float) -> None:
        """Move the job's progress bar; on a pipe, print every tenth step instead."""
        self.nothing_yet()
        if self._progress.disable:
            if (step + 1) % 10 == 0:
                self.line(f"{job}: step {step + 1}/{total}, loss {loss:.3f}", style="dim")
            return
        task = self._tasks.get(job)
        if task is None:
            task = self._tasks[job] = self._progress.add_task(job, total=total, completed=step, loss="")
        self._progress.update(task, completed=step + 1, loss=f"{loss:.3f}")

    def finish_steps(self, job: str) -> None:
        """Take the job's bar away."""
        task = self._tasks.pop(job, None)
        if task is not None:
            self._progress.remove_task(task)

    def panel(self, title: str, body: str, *, style: str) -> None:
        """A box for what must not be overlooked. `body` is shown as it is, never parsed as markup."""
        self.console.print(Panel(Text(body), title=title, border_style=style, expand=False, padding=(1, 2)))

    def facts(self, title: str, rows: Mapping[str, str]) -> None:
        """A two-column table."""
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(Text(name, style="dim"), Text(value))
        self.console.print(table)

    def proofs(self, rows: Sequence[tuple[str, str, bool]]) -> None:
        """Claim, what was seen, whether it holds."""
        table = Table(show_header=True, header_style="bold", padding=(0, 1))
        for heading in ("claim", "seen", ""):
            table.add_column(heading, overflow="fold")
        for claim, seen, holds in rows:
            mark = Text("holds", style="green") if holds else Text("FAILS", style="bold red")
            table.add_row(Text(claim), Text(seen), mark)
        self.console.print(table)
