"""A small GPT over bytes: pre-norm blocks, causal attention, dropout, tied embedding. Trains on a CPU in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.corpus import VOCABULARY_SIZE


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Sizes of the model."""

    width: int = 96
    """Channels of the residual stream."""
    heads: int = 4
    layers: int = 3
    context: int = 64
    """Longest sequence, in tokens."""
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and MLP, each with its own norm and residual."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same shape."""
        batch, tokens, width = stream.shape
        query, key, value = self.query_key_value(self.norm_attention(stream)).split(width, dim=2)
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for part in (query, key, value)
        )
        rate = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        merged = attended.transpose(1, 2).reshape(batch, tokens, width)
        stream = stream + functional.dropout(self.projection(merged), self.dropout, self.training)
        hidden = functional.gelu(self.expand(self.norm_mlp(stream)))
        return stream + functional.dropout(self.contract(hidden), self.dropout, self.training)


class ByteGpt(nn.Module):
    """Next-byte language model."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY_SIZE, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY_SIZE, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, tokens] -> logits float32 [batch, tokens, 256]."""
        stream = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the next byte, a scalar in nats."""
    inputs, targets = batch
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> tuple[nn.Module, Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]]:
    """The model and its loss as the training has them: what `truestep confirm` repeats a bundle with."""
    return ByteGpt(GptConfig()), next_byte_loss
