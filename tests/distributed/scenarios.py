"""What the ranks of the distributed tests do. Every function runs in its own process and returns plain JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import Attachment, attach
from truestep.contract import Alarm
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.inject import ArmedFault, Fault, arm
from truestep.protocols import ResumePoint
from truestep.schedule import Schedule
from truestep.train import train

VOCABULARY = 32
TOKENS = 12


class Block(nn.Module):
    """Attention and MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm(stream)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        stream = stream + attended
        result: Tensor = stream + self.mlp(stream)
        return result


class Transformer(nn.Module):
    """Tied embedding, two blocks: what most users train, in the small."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


class ConvolutionalWithBatchNorm(nn.Module):
    """Has running statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2))).relu()
        logits: Tensor = self.head(features.transpose(1, 2))
        return logits


MODELS = {"transformer": Transformer, "batch_norm": ConvolutionalWithBatchNorm}


def micro_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The data of any step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def next_token_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next token."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Run:
    """A model, its optimizer, and what a fault did to it."""

    def __init__(self, rank: int, model: str = "transformer", *, attached: bool = True, **ddp: Any) -> None:
        self.rank = rank
        torch.manual_seed(7)
        self.ddp = DistributedDataParallel(MODELS[model](), **ddp)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.attachment: Attachment | None = attach(self.ddp) if attached else None
        torch.manual_seed(100 + rank)
        self.losses: list[float] = []

    def batches(self, steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's data."""
        for step in range(start, steps):
            yield micro_batch(step, self.rank)

    def train_plainly(self, steps: int, start: int = 0) -> None:
        """The loop without truestep."""
        for batch in self.batches(steps, start):
            self.optimizer.zero_grad(set_to_none=True)
            loss = next_token_loss(self.ddp, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(loss.item())

    def train(self, steps: int, schedule: Schedule, start: int = 0, **options: Any) -> Alarm | None:
        """The loop with it."""
        assert self.attachment is not None
        return train(
            self.ddp,
            self.attachment,
            self.optimizer,
            self.batches(steps, start),
            options.get("compute_loss", next_token_loss),
            options.get("rebuild_batch", micro_batch),
            options.get("checkpoints"),
            schedule,
            start_step=start,
            on_step=lambda _, loss: self.losses.append(loss.item()),
        )

    def state(self) -> dict[str, Any]:
        """Everything that must be equal between two runs that claim to be."""
        buffers = {name: buffer.tolist() for name, buffer in self.ddp.module.named_buffers()}
        return {
            "weights": fingerprint_model(self.ddp)[0],
            "optimizer": fingerprint_optimizer(self.optimizer, self.ddp)[0],
            "losses": self.losses,
            "buffers": buffers,
            "random": torch.rand(1).item(),
        }


def plain_run(rank: int, model: str, steps: int) -> dict[str, Any]:
    """Plain DDP."""
    run = Run(rank, model, attached=False)
    run.train_plainly(steps)
    return run.state()


def audited_run(rank: int, model: str, steps: int, audit_every: int | None) -> dict[str, Any]:
    """The same, guarded."""
    run = Run(rank, model)
    alarm = run.train(steps, Schedule(audit_every=audit_every, check_every=10))
    return {**run.state(), "alarm": None if alarm is None else alarm.to_json()}


def faulty_run(
    rank: int, faulty_rank: int | None, fault: dict[str, Any], steps: int, **schedule: Any
) -> dict[str, Any]:
    """Train with a fault in one rank (None: in every rank)."""
    run = Run(rank)
    armed: ArmedFault | None = None
    if faulty_rank is None or rank == faulty_rank:
        armed = arm(run.ddp, run.optimizer, Fault.from_json(fault))
    saved: list[int] = []
    alarm = run.train(steps, Schedule(**schedule), checkpoints=saved.append)
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "firings": 0 if armed is None else armed.firings,
        "saved": saved,
        "steps": len(run.losses),
        "outbox": sorted(path.name for path in Path(_outbox()).glob("*")) if Path(_outbox()).exists() else [],
    }


def interrupted_run(rank: int, steps: int, stop: int | None, start: int, directory: str) -> dict[str, Any]:
    """Train to `stop` and save, or resume at `start` from what such a run saved."""
    from truestep import rng
    from truestep.rng import RngState

    run = Run(rank)
    schedule = Schedule(audit_every=5, check_every=5)
    path = Path(directory) / f"rank-{rank}.pt"
    if start:
        saved = torch.load(path, weights_only=True)
        run.ddp.module.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        rng.restore(RngState.from_document(saved["rng"]))
        assert run.attachment is not None
        run.attachment.resumed = ResumePoint(start_step=start)  # type: ignore[arg-type]
    alarm = run.train(stop or steps, schedule, start)
    assert alarm is None
    if stop:
        state = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save({**state, "rng": rng.capture().to_document()}, path)
    return run.state()


def _outbox() -> str:
    import os

    return os.environ["TRUESTEP_OUTBOX_DIR"]
