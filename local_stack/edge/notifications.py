"""The HTTP subscriber of the SNS topics: keeps what it received, as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Inbox:
    """What subscribers received. Messages are the JSON bodies of SNS's HTTP deliveries."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def receive(self, body: bytes) -> dict[str, Any]:
        """Keep one delivery and return it. Raises ValueError for a body that is no JSON object."""
        delivery = json.loads(body)
        if not isinstance(delivery, dict):
            raise TypeError(f"an SNS delivery is a JSON object, not {type(delivery).__name__}")
        self._file.write(json.dumps(delivery) + "\n")
        return delivery

    def close(self) -> None:
        """Close the file."""
        self._file.close()
