"""Every training feature that audits must leave alone, each trained three ways in one process group: without truestep,
guarded, and guarded with one faulty rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.scenarios import VOCABULARY, ConvolutionalWithBatchNorm, Transformer, micro_batch
from truestep.attachment import attach
from truestep.contract import Alarm
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.guard import CorruptionDetected, Guard
from truestep.inject import Fault, arm
from truestep.schedule import Schedule

STEPS = 6
AUDIT_EVERY = 2
FAULT_STEP = 3
"""Audited, and in the middle: the audit at step 1 passes before."""
FAULTY_RANK = 1


class Checkpointed(Transformer):
    """Recomputes its blocks in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=self.reentrant)
        logits: Tensor = self.head(stream)
        return logits


class Frozen(Transformer):
    """Trains its blocks only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[0].norm.requires_grad_(False)


class SparseEmbedding(Transformer):
    """Its embedding's gradient is sparse; the head is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, sparse=True)
        self.head = nn.Linear(16, VOCABULARY, bias=False)


class Branching(Transformer):
    """Leaves one of two branches out, by the first token: another one on every rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        stream = self.blocks(self.embedding(tokens))
        stream = stream + self.branches[int(tokens[0, 0]) % 2](stream)
        logits: Tensor = self.head(stream)
        return logits


class NeverUsed(Transformer):
    """Has a parameter that no forward touches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(16, 16)


class Centred(Transformer):
    """Keeps a moving average of its own in a buffer, replaces another buffer, and uses both in the next step."""

    center: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(16))
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        stream = self.embedding(tokens) - self.center * (1 + self.seen)
        if self.training:
            self.center.mul_(0.9).add_(stream.detach().mean((0, 1)), alpha=0.1)
            self.seen = self.seen + 0.01
        logits: Tensor = self.head(self.blocks(self.norm(stream)))
        return logits


@dataclass(frozen=True, kw_only=True)
class Feature:
    """How a run is set up; the defaults are a transformer with dropout and tied weights in float32."""

    model: Callable[[], nn.Module] = Transformer
    ddp: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[[], Any] = lambda: None
    """A communication hook, or (state, hook), as `attach` takes it."""
    autocast: torch.dtype | None = None
    scaled: bool = False
    micro_batches: int = 1
    target: str = "blocks.1.mlp.2"
    """Module whose output the fault changes."""
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def _power_sgd() -> Any:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook


def _bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    # Under its own name: DDP refuses the original by its name where there is no NCCL, though Gloo can do it.
    reduced: torch.futures.Future[Tensor] = bf16_compress_hook(state, bucket)
    return reduced


_bf16.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


def _compiled() -> nn.Module:
    # Traced and differentiated by the compiler, without its code generator: what a replay may break (guards,
    # recompilation, the graph's own backward) is the same. The hooks of an OptimizedModule itself run outside of the
    # graph, so that a fault there is not traced.
    module: nn.Module = torch.compile(Transformer(), backend="aot_eager")  # type: ignore[assignment]
    return module


INDUCTOR = "Inductor"
"""Takes ten seconds to compile its first graph, so that one test alone runs it, on a model of two layers."""


def _inductor() -> nn.Module:
    layers = nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, VOCABULARY)
    module: nn.Module = torch.compile(nn.Sequential(nn.Embedding(VOCABULARY, 16), *layers))  # type: ignore[assignment]
    return module


FEATURES: dict[str, Feature] = {
    INDUCTOR: Feature(model=_inductor, target=""),
    "dropout and tied weights": Feature(),
    "batch norm": Feature(model=ConvolutionalWithBatchNorm, target="convolution"),
    "other buffers": Feature(model=Centred),
    "other buffers, not broadcast": Feature(model=Centred, ddp={"forward_sync_buffers": False}),
    "autocast bf16": Feature(autocast=torch.bfloat16),
    "autocast fp16 with GradScaler": Feature(autocast=torch.float16, scaled=True),
    "accumulation": Feature(micro_batches=3),
    "accumulation with GradScaler": Feature(autocast=torch.float16, scaled=True, micro_batches=2),
    "checkpointing, reentrant": Feature(model=lambda: Checkpointed(reentrant=True)),
    "checkpointing, not reentrant": Feature(model=lambda: Checkpointed(reentrant=False)),
    "checkpointing, autocast, accumulation": Feature(
        model=lambda: Checkpointed(reentrant=False), autocast=torch.bfloat16, micro_batches=2
    ),
    "frozen parameters": Feature(model=Frozen),
    "sparse embedding": Feature(model=SparseEmbedding, optimizer=torch.optim.SGD),
    "unused parameters": Feature(model=Branching, ddp={"find_unused_parameters": True}),
    "static graph": Feature(model=NeverUsed, ddp={"static_graph": True}),
    "static graph, checkpointing": Feature(model=lambda: Checkpointed(reentrant=True), ddp={"static_graph": True}),
    "bucket views": Feature(ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
    "fp16 hook": Feature(hook=lambda: (None, fp16_compress_hook)),
    "bf16 hook": Feature(hook=lambda: (None, _bf16)),
    "PowerSGD": Feature(hook=_power_sgd),
    "PowerSGD, bucket views": Feature(hook=_power_sgd, ddp={"gradient_as_bucket_view": True}),
    "compiled": Feature(model=_compiled, target=""),
}


class FeatureRun:
    """One training run of a feature."""

    def __init__(self, name: str, rank: int, *, guarded: bool, faulty: bool = False) -> None:
        self.feature = feature = FEATURES[name]
        self.rank = rank
        torch.manual_seed(7)
        self.ddp = DistributedDataParallel(feature.model(), **feature.ddp)
        self.optimizer = feature.optimizer([p for p in self.ddp.parameters() if p.requires_grad], lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=feature.scaled)
        self.guard: Guard | None = None
        hook = feature.hook()
        if guarded:
            attach(self.ddp, comm_hook=hook)
            self.guard = Guard(
                self.ddp,
                self.optimizer,
                Schedule(audit_every=AUDIT_EVERY, check_every=3),
                compute_loss=self.loss,
                grad_scaler=self.scaler,
                checkpoints=lambda _: None,
            )
        elif hook is not None:
            self.ddp.register_comm_hook(*hook)
        fault = Fault(site="module_output", target=feature.target, element=5, bit=20, first_step=FAULT_STEP)
        self.armed = arm(self.ddp, self.optimizer, fault) if faulty else None
        torch.manual_seed(100 + rank)
        self.losses: list[str] = []

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the next token, of this feature's precision."""
        dtype = self.feature.autocast
        inputs, targets = batch
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            value = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        return value / self.feature.micro_batches

    def train(self) -> Alarm | None:
        """All steps, or up to the alarm."""
        try:
            for step in range(STEPS):
                self._step(step)
        except CorruptionDetected as detected:
            return detected.alarm
        return None

    def state(self) -> dict[str, Any]:
        """What two runs must agree on, bit for bit."""
        return {
            "weights": fingerprint_model(self.ddp)[1],
            "buffers": {name: buffer.tolist() for name, buffer in self.ddp.module.named_buffers()},
            "gradients": {
                name: None if p.grad is None else p.grad.to_dense().view(torch.int32).sum().item()
                for name, p in self.ddp.module.named_parameters()
            },
            "optimizer": fingerprint_optimizer(self.optimizer, self.ddp)[0],
            "losses": self.losses,
            "scale": self.scaler.get_scale(),
            "random": torch.rand(1).item(),
        }

    def _step(self, step: int) -> None:
        count, guard = self.feature.micro_batches, self.guard
        self.optimizer.zero_grad(set_to_none=True)
        batches = [micro_batch(step * 10 + index, self.rank) for index in range(count)]
        if guard:
            guard.start_step(step, batches[0] if count == 1 else None, micro_batches=count)
        loss = torch.zeros(())
        for index, batch in enumerate(batches):
            with self._synchronised(index == count - 1), self._recorded(index, batch) as done:
                loss = self.loss(self.ddp, batch)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                done(loss)
        self.scaler.unscale_(self.optimizer)
        if guard:
            guard.before_update(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if guard:
            guard.after_update()
        self.losses.append(float(loss.detach()).hex())

    def _synchronised(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()

    @contextmanager
    def _recorded(self, index: int, batch: Any) -> Iterator[Callable[[Tensor], None]]:
        if self.guard and self.feature.micro_batches > 1:
            with self.guard.micro_batch(index, batch) as done:
                yield done
        else:
            yield lambda _: None


def feature_runs(rank: int, names: list[str]) -> dict[str, Any]:
    """Every named feature: the plain twin, the guarded run, and the guarded run with a fault in `FAULTY_RANK`."""
    return {name: _three_runs(name, rank) for name in names}


def inductor_runs(rank: int, cache: str) -> dict[str, Any]:
    """The plain twin and the guarded run, without a fault. cache: directory of what is compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    plain = FeatureRun(INDUCTOR, rank, guarded=False)
    plain.train()
    expected = plain.state()
    guarded = FeatureRun(INDUCTOR, rank, guarded=True)
    alarm = guarded.train()
    assert guarded.guard is not None
    return {
        "plain": expected,
        "guarded": guarded.state(),
        "alarm": None if alarm is None else alarm.to_json(),
        "clean_through": guarded.guard.clean_through,
    }


def _three_runs(name: str, rank: int) -> dict[str, Any]:
    plain = FeatureRun(name, rank, guarded=False)
    plain.train()
    expected = plain.state()
    guarded = FeatureRun(name, rank, guarded=True)
    false_alarm = guarded.train()
    ended = guarded.state()
    assert guarded.guard is not None
    faulty = FeatureRun(name, rank, guarded=True, faulty=rank == FAULTY_RANK)
    alarm = faulty.train()
    return {
        "plain": expected,
        "guarded": ended,
        "false_alarm": None if false_alarm is None else false_alarm.to_json(),
        "clean_through": guarded.guard.clean_through,
        "alarm": None if alarm is None else alarm.to_json(),
        "firings": faulty.armed.firings if faulty.armed else 0,
    }
