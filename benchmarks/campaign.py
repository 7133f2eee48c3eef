"""What the campaigns share: small models, one process group for all cells, results as JSON lines, remaining time."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, TOKENS, SEQUENCES = 32, 16, 12, 4


class Attention(nn.Module):
    """One causal head with its three projections apart, so that a fault can sit on each path."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.query(stream), self.key(stream), self.value(stream)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.norm(stream))
        result: Tensor = stream + self.dropout(self.mlp(stream))
        return result


class Transformer(nn.Module):
    """Two blocks; computes its own loss in a module, so that a fault can sit there too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        loss: Tensor = self.loss(logits.flatten(0, 1), targets.flatten())
        return loss


class Convolutional(nn.Module):
    """BatchNorm, whose running statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.convolution, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.head, self.loss = nn.Linear(8, VOCABULARY), nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        features = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2))).relu()
        loss: Tensor = self.loss(self.head(features.transpose(1, 2)).flatten(0, 1), targets.flatten())
        return loss


def batch_of(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The data of any step and rank of a cell."""
    generator = torch.Generator().manual_seed((seed * 100_003 + step) * 64 + rank)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss as audits replay it."""
    result: Tensor = model(*batch)
    return result


def run_in_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """`work(rank, *arguments)` in one process group, a node a rank. Raises `SystemExit` where a rank fails."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_enter, args=(work, rank, ranks, directory, arguments), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed; its traceback is above. Run the command again: it goes on where it ended")


def _enter(work: Callable[..., None], rank: int, ranks: int, directory: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=f"node-{rank}", TRUESTEP_OUTBOX_DIR=f"{directory}/outbox")
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/no-directive.json"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file; a last line that a killed run left half written is dropped."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def appended(path: Path, rank: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Append rows to a results file; only rank 0 writes."""
    if rank != 0:
        yield lambda _row: None
        return
    rows = read_rows(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with path.open("a") as file:

        def append(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        yield append


class Progress:
    """One line that says how far a campaign is and how long it will still take."""

    def __init__(self, what: str, total: int, done: int, rank: int) -> None:
        """done: how many a former run finished already."""
        self._what, self._total, self._before, self._quiet = what, total, done, rank != 0
        self._started = self._shown = time.monotonic()

    def show(self, done: int, note: str = "") -> None:
        """Say it, every five seconds at most."""
        now = time.monotonic()
        if self._quiet or (now - self._shown < 5 and done < self._total):
            return
        self._shown = now
        pace = (now - self._started) / max(1, done - self._before)
        left = int(pace * (self._total - done))
        sys.stdout.write(f"{self._what}: {done}/{self._total}, {left // 60} min {left % 60} s left {note}\n")
        sys.stdout.flush()


class Silent:
    """A reporter that sends nothing: alarms of a campaign are its results."""

    def alarm(self, alarm: Any) -> None:
        """Nothing."""

    def verified(self, resumed: Any, step: Any) -> None:
        """Nothing."""

    def flush(self, timeout_seconds: float) -> bool:  # noqa: ARG002 - the name is the protocol's
        """Nothing waits."""
        return True
