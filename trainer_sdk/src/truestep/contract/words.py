"""Counts as people read them; every message of the SDK and of the recovery takes them from here."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 pod``, ``2 pods``, ``12,000 steps``. plural: where it is more than the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def plainly(token: str) -> str:
    """``awaiting approval`` of ``awaiting_approval``: a status or an outcome as people read it."""
    return token.replace("_", " ")


def as_sentence(text: str) -> str:
    """`text` with a capital in front and a full stop behind, where it stands among other sentences.

    A first word that is more than letters is a name, of a node or a file, and stays as it is.
    """
    text = text.strip()
    if not text:
        return ""
    begin = text[0].upper() if text.split(maxsplit=1)[0].rstrip(",:;.").isalpha() else text[0]
    return begin + text[1:] + ("" if text[-1] in ".!?…" else ".")
