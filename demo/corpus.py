"""Real text to train on: the Python documentation that ships with CPython, as bytes."""

from __future__ import annotations

import functools
from pydoc_data import topics

import torch
from torch import Tensor

VOCABULARY_SIZE = 256


@functools.cache
def corpus() -> Tensor:
    """All topics, sorted by name and joined: uint8 [bytes].

    The same for one CPython version, which every rank shares.
    """
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def micro_batch(step: int, rank: int, *, sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank's micro-batch, int64 [sequences, context] each.

    A pure function of step and rank, so that any rank can rebuild any other's batch.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    data = corpus()
    starts = torch.randint(0, data.numel() - context - 1, (sequences,), generator=generator)
    windows = torch.stack([data[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
