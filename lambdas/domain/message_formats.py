"""One notification in the forms that its readers take: e-mail, a phone, a chat channel. Everything in it is escaped.

SNS picks the form by the subscription's protocol. E-mail, SQS and HTTP get the text; a phone gets a line with the link;
HTTPS gets the custom notification of Amazon Q Developer in chat applications (Slack, Teams), which subscribes so.
Source of its schema: that service's administrator guide, "Custom notifications", version 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

PHONE_LIMIT_BYTES = 420
"""Three parts of a concatenated message; a link takes about half of it and is never cut."""
CHAT_LIMIT_CHARACTERS = 2500
TEXT_LIMIT_BYTES = 60_000
"""All forms travel in one message of at most 256 KB."""


def formats(subject: str, text: str, *, url: str = "", thread: str = "") -> Mapping[str, str]:
    """SNS protocol -> message; ``default`` is the text.

    url: where the reader acts, whole in every form. thread: the incident's id, so that a channel keeps its reminders
    and its end together.
    """
    return {
        "default": _cut(text, TEXT_LIMIT_BYTES),
        "sms": _phone(subject, url),
        "https": json.dumps(_chat(subject, text, url, thread), ensure_ascii=False),
    }


def _phone(subject: str, url: str) -> str:
    link = f" {url}" if url else ""
    return _cut(f"truestep: {subject}", PHONE_LIMIT_BYTES - len(link.encode())) + link


def _chat(subject: str, text: str, url: str, thread: str) -> dict[str, object]:
    # The link has a line of its own below; in the text it would be escaped into something that cannot be clicked.
    body = "\n".join(line for line in text.splitlines() if line != url)
    content: dict[str, object] = {
        "textType": "client-markdown",
        "title": _plain(subject),
        "description": _plain(body)[:CHAT_LIMIT_CHARACTERS],
    }
    if url:
        content["nextSteps"] = [f"Open the incident's page: {url}"]
    metadata = {"threadId": thread, "summary": _plain(subject)} if thread else {"summary": _plain(subject)}
    return {"version": "1.0", "source": "custom", "content": content, "metadata": metadata}


def _plain(text: str) -> str:
    """Text of an event must not mention a channel or hide a link: these start with a bracket."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cut(text: str, limit: int) -> str:
    return text.encode()[: max(0, limit)].decode(errors="ignore")
