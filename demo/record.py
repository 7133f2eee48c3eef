"""Run the default story, approved by itself, and keep its last three parts as the README's picture.

python -m demo.record [docs/images/demo.svg]
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from demo.scenarios import tell
from demo.settings import DemoSettings
from demo.stage import REPOSITORY
from demo.view import View

PICTURE = REPOSITORY / "docs" / "images" / "demo.svg"
FIRST_CHAPTER = "3"
WIDTH = 112
"""Columns; the README is read at about that."""
FONTS = "ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace"
"""Rich would load one from the web."""


class RecordedView(View):
    """Shows the story and records it, without progress bars and without what only this machine has."""

    def __init__(self) -> None:
        super().__init__(Console(record=True, width=WIDTH, highlight=False, force_terminal=False))

    def chapter(self, title: str) -> None:
        if title.startswith(FIRST_CHAPTER):
            self.console.export_text(clear=True)
        super().chapter(title)

    def line(self, text: str, *, style: str = "") -> None:
        super().line(text.replace(f"{REPOSITORY}/", ""), style=style)

    def steps(self, *_: object, **__: object) -> None:
        self.nothing_yet()

    def picture(self) -> str:
        """What was recorded, as SVG."""
        drawn = self.console.export_svg(title="make demo APPROVE=auto", unique_id="demo")
        drawn = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->", "", drawn, flags=re.DOTALL)
        return re.sub(r"font-family: Fira Code[^;]*", f"font-family: {FONTS}", drawn)


def main() -> int:
    target = Path(sys.argv[1]) if sys.argv[1:] else PICTURE
    view = RecordedView()
    with view:
        code = tell(replace(DemoSettings(), approve_automatically=True, state_dir=REPOSITORY / ".local" / "demo"), view)
    target.write_text(view.picture())
    return code


if __name__ == "__main__":
    raise SystemExit(main())
