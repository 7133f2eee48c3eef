"""Running a micro-batch of another rank on this rank's copy of the weights, bit for bit, without leaving a trace.

The pass runs through `torch.func.functional_call` over detached aliases of the parameters and clones of the buffers,
and its backward runs *inside* that call: reentrant activation checkpointing recomputes there, and would otherwise put
gradients into the real `.grad`. DDP's reducer, `.grad`, the buffers, the optimizer, the modules' own Python attributes
and the user's random numbers see nothing of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from truestep import rng
from truestep.checks.buckets import Flag, nonfinite_flag
from truestep.checks.determinism import collect_nondeterministic
from truestep.checks.isolation import isolated
from truestep.contract import Rank, Step, sha256_hex
from truestep.fingerprint import fingerprint_nested, fingerprint_tensor, pending_sums, settle_sums
from truestep.python_state import python_state_kept
from truestep.rng import RngState
from truestep.serialization import save_unchecked

ComputeLoss = Callable[[Any, Any], torch.Tensor]
RebuildBatch = Callable[[Step, Rank], Any]


def _own_rank() -> int | None:
    return dist.get_rank() if dist.is_initialized() else None


def _own_world_size() -> int | None:
    return dist.get_world_size() if dist.is_initialized() else None


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """What a forward and backward start from, beside the weights."""

    batch: Any
    rng: RngState
    buffers: Mapping[str, torch.Tensor]
    loss_scale: float = 1.0
    """GradScaler's factor."""
    rank: int | None = field(default_factory=_own_rank)
    """Global rank of the process whose pass it is, which a loss may ask for; None without a process group."""
    world_size: int | None = field(default_factory=_own_world_size)
    """Ranks of its job."""

    def fingerprint(self) -> str:
        """32 hex digits over all of it."""
        parts = [
            fingerprint_nested(self.batch),
            self.rng.fingerprint(),
            fingerprint_nested(self.buffers),
            self.loss_scale,
            self.rank,
            self.world_size,
        ]
        return sha256_hex(parts)[:32]

    def to_bytes(self) -> bytes:
        """For shipping to another rank of the job."""
        stream = io.BytesIO()
        document = {
            "batch": self.batch,
            "rng": self.rng.to_document(),
            "buffers": dict(self.buffers),
            "loss_scale": self.loss_scale,
            "rank": self.rank,
            "world_size": self.world_size,
        }
        save_unchecked(document, stream)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> PassInputs:
        """Inverse; tensors that were on an accelerator come to this process's current one."""
        # A batch may hold any class, and the bytes come from a rank of the same job over its own process group:
        # the same trust as torch.distributed.scatter_object_list asks for.
        return cls.from_document(torch.load(io.BytesIO(data), map_location=_to_own_device, weights_only=False))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PassInputs:
        """From what `torch.load` gives for `to_bytes`."""
        return cls(
            batch=document["batch"],
            rng=RngState.from_document(document["rng"]),
            buffers=document["buffers"],
            loss_scale=document["loss_scale"],
            rank=document["rank"],
            world_size=document["world_size"],
        )


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a forward and backward gave."""

    loss: str = ""
    """Printed fingerprint; empty where the loss is not known (a loop that does not hand it to `before_update`)."""
    loss_value: str = ""
    gradients: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter -> fingerprint of each gradient that arrived at it, in order; empty where they were not recorded."""
    nonfinite: bool = False
    """Whether a gradient held NaN or Inf; only known for replays that note it."""
    nondeterministic: tuple[str, ...] = ()
    """Kernels without a deterministic version that ran."""


class GradientRecorder:
    """Fingerprints gradients as they arrive at leaves, one entry per firing (two where it is sparse), and holds none.

    It listens with `Tensor.register_hook`: that sees the micro-batch alone where `.grad` is already a sum
    (accumulation), and one arrival per backward of a weight that reentrant checkpointing uses in several segments,
    where post-accumulate hooks see partial sums.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor], *, flags: bool = False) -> None:
        """leaves: name -> leaf that requires a gradient. flags: also note non-finite gradients."""
        self._pending: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self._flags: list[Flag] = []
        self._want_flags = flags
        self._handles = [
            leaf.register_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]
            for name, leaf in leaves.items()
            if leaf.requires_grad
        ]

    def close(self) -> tuple[dict[str, tuple[str, ...]], bool]:
        """Stop listening. Returns the fingerprints, and whether a gradient was non-finite. One host synchronisation a
        device."""
        self.stop()
        flat = [(name, *entry) for name, entries in sorted(self._pending.items()) for entry in entries]
        settled = settle_sums([sums for _, sums, _ in flat], [length for _, _, length in flat])
        table: dict[str, tuple[str, ...]] = {}
        for (name, _, _), value in zip(flat, settled, strict=True):
            table[name] = (*table.get(name, ()), str(value))
        return table, any(bool(flag) for flag in self._flags)

    def stop(self) -> None:
        """Stop listening, and ask for nothing. No synchronisation."""
        for handle in self._handles:
            handle.remove()

    def _arrived(self, name: str, gradient: torch.Tensor) -> None:
        gradient = gradient.detach()
        pending = self._pending.setdefault(name, [])
        for part in _parts(gradient):
            pending.append((pending_sums(part), part.numel() * part.element_size()))
        if self._want_flags:
            self._flags.append(nonfinite_flag(gradient))


def _parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # As they are: densified, the gradient of a large embedding would not fit. Uncoalesced entries keep their order.
    return (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)


class _Stage(nn.Module):
    """Stands where the DDP model stood: calls its module, and has `.module` and `.no_sync` for losses that use them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the module."""
        return self.module(*arguments, **keywords)

    def no_sync(self) -> Any:
        """There is nothing to synchronise in a replay."""
        return nullcontext()


class _Enclosure(nn.Module):
    """Runs a body as its forward, so that everything in it sees the replaced parameters."""

    def __init__(self, stage: _Stage, body: Callable[[_Stage], torch.Tensor]) -> None:
        super().__init__()
        self.stage = stage
        self.body = body

    def forward(self) -> torch.Tensor:
        """Forward and backward."""
        return self.body(self.stage)


def replay(
    module: nn.Module, inputs: PassInputs, compute_loss: ComputeLoss, *, notes_nonfinite: bool = False
) -> PassResult:
    """Forward and backward of `inputs` on the weights of `module` (the one inside DDP). No communication.

    notes_nonfinite: also look for NaN and Inf, which is one more pass over every gradient.
    Peak memory: one parameter's gradient at a time beyond the activations. Raises whatever the pass raises; the random
    number generators are put back all the same.
    """
    aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    # A buffer may be made or reshaped by the forward: the producer's are taken as they are.
    buffers = {name: b.detach().clone() for name, b in {**dict(module.named_buffers()), **inputs.buffers}.items()}
    for alias in aliases.values():
        if alias.requires_grad:
            alias.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    own = rng.capture()
    recorder = GradientRecorder(aliases, flags=notes_nonfinite)
    try:
        rng.restore(inputs.rng)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
        with (
            python_state_kept(module),
            torch.enable_grad(),
            isolated(inputs.rank),
            collect_nondeterministic() as kernels,
        ):
            loss = _run(module, {**aliases, **buffers}, inputs, compute_loss)
    finally:
        gradients, nonfinite = recorder.close()
        rng.restore(own)
    return PassResult(
        loss=str(fingerprint_tensor(loss)),
        loss_value=repr(float(loss)),
        gradients=gradients,
        nonfinite=nonfinite,
        nondeterministic=tuple(sorted(set(kernels))),
    )


def _run(
    module: nn.Module, state: Mapping[str, torch.Tensor], inputs: PassInputs, compute_loss: ComputeLoss
) -> torch.Tensor:
    def body(stage: _Stage) -> torch.Tensor:
        loss = compute_loss(stage, inputs.batch)
        # GradScaler multiplies by a float32 tensor; so does this, or the last bit of the scaled loss could differ.
        scaled = loss if inputs.loss_scale == 1.0 else loss * torch.full((), inputs.loss_scale, device=loss.device)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    enclosure = _Enclosure(_Stage(module), body)
    named = {f"stage.module.{name}": tensor for name, tensor in state.items()}
    result: torch.Tensor = functional_call(enclosure, named, ())
    return result


def _drop_gradient(leaf: torch.Tensor) -> None:
    leaf.grad = None


def _to_own_device(storage: Any, location: str) -> Any:
    return storage if location == "cpu" else storage.cuda(torch.cuda.current_device())
