"""A batch as it was in front of its pass, although the loss may write to it; and one made again by `rebuild_batch`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

from truestep import rng
from truestep.contract import Rank, Step
from truestep.fingerprint import slots_of
from truestep.replay import RebuildBatch


class BatchChangedError(Exception):
    """The batch is no longer what the pass started from; says what to do."""


class RebuildError(Exception):
    """`rebuild_batch` raised; says how it was called and what it must take."""


def rebuilt(rebuild_batch: RebuildBatch, step: Step, rank: Rank) -> Any:
    """The user's batch, without a trace of its making in the user's random numbers. Raises `RebuildError`."""
    own = rng.capture()
    try:
        return rebuild_batch(step, rank)
    except Exception as error:
        raise RebuildError(
            f"rebuild_batch({step}, {rank}) raised {type(error).__name__}: {error}; it is called with two integers, "
            "(step, rank), on any rank, and must return the batch that this rank trains on in this step"
        ) from error
    finally:
        rng.restore(own)


def unfit_for_rebuilding(rebuild_batch: RebuildBatch) -> str:
    """Why a call with (step, rank) would not even begin; empty where it would, or nothing can be told."""
    try:
        signature = inspect.signature(rebuild_batch)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(0, 0)
    except TypeError as error:
        name = getattr(rebuild_batch, "__name__", type(rebuild_batch).__name__)
        return (
            f"rebuild_batch is called as rebuild_batch(step, rank), and {name}{signature} cannot be ({error}): let it "
            "take these two and return the batch that this rank trains on in this step, or pass None"
        )
    return ""


class KeptBatch:
    """Keeps a batch. Containers and everything on the host are copied; tensors only where `copies_tensors`.

    Otherwise their versions tell whether somebody wrote to them since: no pass over their data, no synchronisation.
    """

    def __init__(self, batch: Any, *, copies_tensors: bool) -> None:
        """batch: what the loss will get. Raises what copying raises where tensors are copied; else `get` says it."""
        self._versions: list[tuple[torch.Tensor, int | None]] = []
        self._failed = ""
        memo: dict[int, Any] = {}
        try:
            for tensor in _tensors(batch, set()):
                if not copies_tensors:
                    memo[id(tensor)] = tensor
                    self._versions.append((tensor, _version(tensor)))
                elif not tensor.is_leaf:
                    # What a frozen encoder gave without no_grad: such a tensor refuses to be copied with its history.
                    memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo).requires_grad_()
            self._batch = copy.deepcopy(batch, memo)
        except Exception as error:
            if copies_tensors:
                raise
            self._failed = f"it cannot be copied ({type(error).__name__}: {error})"[:200]

    def get(self) -> Any:
        """The batch as it was. Raises `BatchChangedError` where that is not certain."""
        written = any(before is None or _version(tensor) != before for tensor, before in self._versions)
        reason = self._failed or ("a tensor of it was written to since" if written else "")
        if reason:
            raise BatchChangedError(
                f"the batch of this step is not known any more: {reason}; let compute_loss leave its batch as it is, "
                "or give the guard rebuild_batch"
            )
        return self._batch


def _version(tensor: torch.Tensor) -> int | None:
    """None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None), type)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: list[Any] = []
    if isinstance(value, Mapping):
        items.extend(value.values())
    elif isinstance(value, (list, tuple, Set)):
        items.extend(value)
    items.extend(getattr(value, "__dict__", {}).values())
    items.extend(getattr(value, name, None) for kind in type(value).__mro__ for name in slots_of(kind))
    for item in items:
        yield from _tensors(item, seen)
