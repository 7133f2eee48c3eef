"""The training that is measured: a byte-level GPT under DDP over Gloo, one process and one thread a rank."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from demo.model import ByteGpt, GptConfig, next_byte_loss

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the training."""

    ranks: int
    sequences: int
    context: int
    width: int
    layers: int
    dropout: float
    autocast: bool

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """The sizes as options. The defaults train 4,096 tokens a rank and step."""
        parser.add_argument("--ranks", type=int, default=3)
        parser.add_argument("--sequences", type=int, default=64)
        parser.add_argument("--context", type=int, default=64)
        parser.add_argument("--width", type=int, default=96)
        parser.add_argument("--layers", type=int, default=3)
        parser.add_argument("--dropout", type=float, default=0.1)
        parser.add_argument("--autocast", action="store_true", help="forward in bfloat16")

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Workload:
        """From parsed options."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})

    def module(self) -> ByteGpt:
        """The same initial weights at every call."""
        torch.manual_seed(0)
        return ByteGpt(GptConfig(width=self.width, layers=self.layers, context=self.context, dropout=self.dropout))

    def trainee(self) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        """A model of its own and its optimizer."""
        model = DistributedDataParallel(self.module())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def batch(self, rank: int) -> Batch:
        """This rank's tokens and targets."""
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(0, 256, (self.sequences, self.context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Includes autocast."""
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext():
            return next_byte_loss(model, batch)

    def setting(self) -> dict[str, Any]:
        """For the report."""
        return {
            "ranks": self.ranks,
            "parameters": sum(parameter.numel() for parameter in self.module().parameters()),
            "tokens_per_rank_and_step": self.sequences * self.context,
            "forward_in": "bfloat16" if self.autocast else "float32",
            "threads_per_rank": 1,
        }


def run_ranks(work: Callable[[int, Workload, Any], Any], workload: Workload, argument: Any = None) -> list[Any]:
    """Run `work(rank, workload, argument)` in a fresh process a rank; what each returned (JSON), in rank order."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(work, rank, workload, argument, directory), daemon=True)
            for rank in range(workload.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed; its traceback is above")
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(workload.ranks)]


def _rank(work: Callable[..., Any], rank: int, workload: Workload, argument: Any, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(NODE_NAME=f"node-{rank}", TRUESTEP_OUTBOX_DIR=f"{directory}/outbox")
    os.environ["TRUESTEP_DIRECTIVE"] = f"{directory}/no-directive.json"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=workload.ranks)
    result = work(rank, workload, argument)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
