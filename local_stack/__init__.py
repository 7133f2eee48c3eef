"""The recovery's cloud and cluster on one machine, wired from the synthesised template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from local_stack.stack import LocalStack

__all__ = ["LocalStack"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the servers import this package too, and have no use for what the stack needs.
    if name == "LocalStack":
        from local_stack.stack import LocalStack

        return LocalStack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
