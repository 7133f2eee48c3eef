"""What DDP's communication hook sees of a step: non-finite values before and after the reduction, and the reduced
bits."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from truestep.collectives import average_bucket
from truestep.contract import sha256_hex
from truestep.fingerprint import pending_sums
from truestep.fingerprint.native import KERNEL

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
UserHook = CommHook | tuple[Any, CommHook]

Flag = bool | torch.Tensor
"""A tensor (0-d, bool) where it lies on an accelerator and is fetched later."""
Sums = tuple[int, ...] | torch.Tensor
"""Three int64; a tensor like a flag."""

_LAYOUT_PASSES = 4
"""DDP rebuilds its buckets once, before the second forward: the layout is recorded this many passes long."""


@dataclass(frozen=True, kw_only=True)
class StepGradients:
    """One rank's view of the step's gradient buckets."""

    local_nonfinite: tuple[int, ...]
    """Indices of buckets whose local gradient held NaN or Inf before the reduction."""
    reduced_nonfinite: tuple[int, ...]
    """Indices of buckets that held NaN or Inf after it."""
    reduced_word: int
    """int64 over the raw bits of all reduced buckets: unequal words on two ranks mean unequal gradients."""


class BucketWatch(Protocol):
    """Whoever wants to see every bucket of a step. Called in the communication hook, from any thread."""

    def before(self, index: int, buffer: torch.Tensor) -> None:
        """The local gradient; it is overwritten afterwards."""

    def after(self, index: int, buffer: torch.Tensor) -> None:
        """The averaged gradient."""


class BucketSensor:
    """Wraps DDP's reduction; accumulates flags on the device, so that a step costs at most one host synchronisation."""

    def __init__(
        self, ddp_model: DistributedDataParallel, group: dist.ProcessGroup, user_hook: UserHook | None
    ) -> None:
        """Registers itself as the model's communication hook. Raises what `register_comm_hook` raises."""
        self._group = group
        self._user_state: Any = None
        self._user_hook: CommHook | None
        if isinstance(user_hook, tuple):
            self._user_state, self._user_hook = user_hook
        else:
            self._user_hook = user_hook
        self._names = {id(parameter): name for name, parameter in ddp_model.module.named_parameters()}
        self._lock = threading.Lock()
        self._local: dict[int, Flag] = {}
        self._reduced: dict[int, tuple[Flag, Sums]] = {}
        self._layout: dict[int, tuple[str, ...]] = {}
        self._layout_sha256 = ""
        self._passes = 0
        self.watch: BucketWatch | None = None
        """Set for the steps whose reduction is checked."""
        sensor = self

        # DDP insists on a function with arguments of exactly these names and annotations.
        def truestep_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001
            return sensor._reduce(bucket)

        truestep_hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
        ddp_model.register_comm_hook(None, truestep_hook)

    @property
    def layout_sha256(self) -> str:
        """Hash of which parameters lie in which bucket, in order; empty before the first backward."""
        with self._lock:
            if self._layout and not self._layout_sha256:
                self._layout_sha256 = sha256_hex([self._layout[index] for index in sorted(self._layout)])
            return self._layout_sha256

    def bucket_parameters(self, index: int) -> tuple[str, ...]:
        """Names of the parameters in a bucket."""
        with self._lock:
            return self._layout.get(index, ())

    @contextmanager
    def without_user_hook(self) -> Iterator[None]:
        """Reduces plainly inside: a pass that is discarded must not enter the state of PowerSGD and its like."""
        hook, self._user_hook = self._user_hook, None
        try:
            yield
        finally:
            self._user_hook = hook

    @property
    def user_hook(self) -> CommHook | None:
        """The user's communication hook, without its state."""
        return self._user_hook

    def take(self) -> StepGradients:
        """What was seen since the last call, and forget it. One host synchronisation on an accelerator."""
        with self._lock:
            local, reduced, self._local, self._reduced = self._local, self._reduced, {}, {}
            self._passes += bool(local)
        indices = sorted(reduced)
        if not indices:
            return StepGradients(local_nonfinite=(), reduced_nonfinite=(), reduced_word=0)
        count = len(indices)
        flags, words = fetch(
            [local[index] for index in indices] + [reduced[index][0] for index in indices],
            [reduced[index][1] for index in indices],
        )
        return StepGradients(
            local_nonfinite=tuple(i for i, flag in zip(indices, flags[:count], strict=True) if flag),
            reduced_nonfinite=tuple(i for i, flag in zip(indices, flags[count:], strict=True) if flag),
            reduced_word=_mix_words(words),
        )

    def forget(self) -> None:
        """Forget what was seen since the last `take`. No synchronisation."""
        with self._lock:
            self._passes += bool(self._local)
            self._local, self._reduced = {}, {}

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, buffer = bucket.index(), bucket.buffer()
        watch = self.watch
        if watch is not None:
            watch.before(index, buffer)
        with self._lock:
            self._local[index] = nonfinite_flag(buffer)
            if self._passes < _LAYOUT_PASSES:
                if index == 0:
                    self._layout = {}
                self._layout_sha256 = ""
                self._layout[index] = tuple(self._names.get(id(p), "?") for p in bucket.parameters())
        if self._user_hook is None:
            future = average_bucket(buffer, self._group)
        else:
            future = self._user_hook(self._user_state, bucket)
        return future.then(lambda done: self._reduced_bucket(index, done.value()))

    def _reduced_bucket(self, index: int, value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        buffer = value[0] if isinstance(value, (list, tuple)) else value
        watch = self.watch
        if watch is not None:
            watch.after(index, buffer)
        observed = look_at_reduced(buffer)
        with self._lock:
            self._reduced[index] = observed
        return buffer


def nonfinite_flag(tensor: torch.Tensor) -> Flag:
    """Whether an element is NaN or Inf. One pass, no temporary of the tensor's size."""
    found = KERNEL.nonfinite(tensor) if _in_host_memory(tensor) else None
    return _by_extremes(tensor) if found is None else found


def look_at_reduced(buffer: torch.Tensor) -> tuple[Flag, Sums]:
    """Whether an element is NaN or Inf, and the fingerprint's sums over the raw bits.

    Nothing weaker will do: a majority of weights names a rank only if the averaged gradients were equal on every step,
    and one plain sum misses half of all equal flips in two elements.
    """
    seen = KERNEL.look(buffer) if _in_host_memory(buffer) else None
    if seen is not None:
        return seen
    return _by_extremes(buffer), pending_sums(buffer.coalesce().values() if buffer.is_sparse else buffer)


def fetch(flags: Sequence[Flag], sums: Sequence[Sums] = ()) -> tuple[list[int], list[int]]:
    """Flags and sums as plain numbers, with one host synchronisation where some still lie on an accelerator."""
    if not any(isinstance(value, torch.Tensor) for value in (*flags, *sums)):
        return [int(flag) for flag in flags], [int(number) for three in sums for number in three]
    device = next(value.device for value in (*flags, *sums) if isinstance(value, torch.Tensor))
    numbers = [torch.stack([torch.as_tensor(flag, device=device) for flag in flags]).long()] if flags else []
    numbers += [torch.as_tensor(three, dtype=torch.int64, device=device) for three in sums]
    values = torch.cat(numbers).tolist()
    return values[: len(flags)], values[len(flags) :]


def _in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_sparse


@torch.no_grad()
def _by_extremes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    # aminmax propagates NaN, and an Inf is an extreme: 40 times faster than isfinite().all() on a CPU.
    low, high = torch.aminmax(tensor)
    # Zero times an Inf or NaN is NaN, which equals nothing.
    return low * 0 != high * 0


def _mix_words(words: Sequence[int]) -> int:
    """An int64 that stands for them all."""
    digest = hashlib.sha256(struct.pack(f"<{len(words)}q", *words)).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def refuse_registered_hook(ddp_model: DistributedDataParallel) -> None:
    """Raises `ValueError` where the model has a communication hook already: DDP takes only one."""
    if getattr(ddp_model, "_comm_hooks", None):
        raise ValueError(
            "the DDP model has a communication hook already, and DDP takes only one; "
            "do not register it yourself but pass it as attach(ddp_model, comm_hook=(state, hook))"
        )


def unreplayable_modules(module: nn.Module) -> list[str]:
    """Names of submodules whose forward communicates, so that one rank alone cannot replay it."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)]
