"""Approve as a person with the link would: open the page, read the form, press the button."""

from __future__ import annotations

import re
import urllib.parse
import urllib.request
from html.parser import HTMLParser

_LINK = re.compile(r"https?://\S+/incidents/\S+")


class ApprovalError(Exception):
    """The link or the page was not what an approver needs; the message says what was seen."""


def link_in(message: str) -> str | None:
    """The approval link in a notification's text."""
    found = _LINK.search(message)
    return found.group(0) if found else None


def follow(link: str, *, decision: str, comment: str) -> str:
    """Open the approval page and send the form of `decision` (``approve`` or ``reject``), with the comment.

    Returns the page's text from before the decision. Raises `ApprovalError` where there is no such form.
    """
    page = _open(link)
    reader = _FormReader()
    reader.feed(page)
    for form in reader.forms:
        if form.fields.get("decision") == decision:
            target = urllib.parse.urljoin(link, form.action)
            _open(target, urllib.parse.urlencode({**form.fields, "comment": comment}).encode())
            return page
    raise ApprovalError(f"the page at {link} has no form to {decision} with; it says: {page[:300]}")


def _open(url: str, body: bytes | None = None) -> str:
    if not url.startswith(("http://127.0.0.1:", "https://")):
        raise ApprovalError(f"refusing to open {url}: not the local stack and not https")
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=30) as response:  # noqa: S310 checked above
        text: str = response.read().decode()
        return text


class _Form:
    def __init__(self, action: str) -> None:
        self.action = action
        self.fields: dict[str, str] = {}


class _FormReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[_Form] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append(_Form(values.get("action", "")))
        elif tag in ("input", "button") and self.forms and values.get("name"):
            self.forms[-1].fields[values["name"]] = values.get("value", "")
