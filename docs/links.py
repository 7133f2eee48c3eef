"""MkDocs hook: links to files of the repository that are no pages of the site become their paths as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page. Raises FileNotFoundError for a link to a file that does not exist."""

    def as_text(match: re.Match[str]) -> str:
        text, target = match.groups()
        source = Path(page.file.abs_src_path)
        path = (source.parent / target).resolve()
        if path.is_relative_to(REPOSITORY / "docs"):
            return match.group(0)
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {target}, which does not exist")
        name = path.relative_to(REPOSITORY)
        return f"{text} (`{name}`)"

    return _LINK.sub(as_text, markdown)
