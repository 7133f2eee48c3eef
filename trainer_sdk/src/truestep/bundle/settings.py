"""How bundles are written; what a user gives to the guard."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_TIMEOUT_SECONDS = 300.0
"""Half of what a collective waits: the other ranks must still be there when the writer gives up."""
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class BundleSettings:
    """Where evidence bundles go and how large they may be. Raises `ValueError` for a setting that makes no sense."""

    model: str = ""
    """``module:function`` that takes nothing and returns (model, compute_loss): the model as it is inside DDP, with any
    weights. Empty: `truestep confirm` must be told with ``--model``."""
    root_uri: str = ""
    """``s3://bucket/prefix`` or ``file:///directory``; empty: the checkpoints' root, or TRUESTEP_CHECKPOINT_ROOT."""
    max_bytes: int = 2 << 30
    """Of a whole bundle. Weights that do not fit are left out, and the bundle says so."""
    timeout_seconds: float = 60.0
    """The alarm waits this long for the bundle, and goes out without it then."""

    def __post_init__(self) -> None:
        if self.model:
            require_factory_name(self.model)
        if self.max_bytes < 1:
            raise ValueError(f"BundleSettings.max_bytes is {self.max_bytes}; give a number of bytes of at least 1")
        if not 0 < self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise ValueError(
                f"BundleSettings.timeout_seconds is {self.timeout_seconds}; give more than 0 and at most "
                f"{MAX_TIMEOUT_SECONDS:.0f} seconds"
            )


def require_factory_name(text: str) -> None:
    """Raise `ValueError` unless `text` reads ``module:function``, with a module that another process can import."""
    if not _FACTORY.fullmatch(text):
        raise ValueError(f"model {text!r} is not of the form module:function, for example training.model:build")
    if text.startswith("__main__:"):
        raise ValueError(f"model {text!r}: another process cannot import __main__; move the function into a module")
