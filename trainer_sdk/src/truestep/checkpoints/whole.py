"""Fingerprints of whole tensors, also where every rank holds only a shard: the same however a model is sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from truestep.fingerprint import combine, fingerprint_tensors, named_state, optimizer_state_tensors


def whole_model(module: nn.Module) -> tuple[str, dict[str, str]]:
    """`truestep.fingerprint.fingerprint_model` over whole tensors. Collective where the model is sharded."""
    table = _table(named_state(module))
    return combine(table), table


def whole_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[str, dict[str, str]]:
    """`truestep.fingerprint.fingerprint_optimizer` over whole tensors. Collective where the model is sharded."""
    table = _table(optimizer_state_tensors(optimizer, module))
    return combine(table), table


def _table(leaves: Mapping[str, torch.Tensor | str]) -> dict[str, str]:
    table = dict(fingerprint_tensors({name: leaf for name, leaf in leaves.items() if not isinstance(leaf, DTensor)}))
    # One at a time: the memory of one whole tensor, not of the model. Sorted: every rank gathers the same one.
    for name, leaf in sorted(leaves.items()):
        if isinstance(leaf, DTensor):
            table.update(fingerprint_tensors({name: leaf.full_tensor()}))
    return table
