"""Fingerprints of what training carries from step to step: models, optimizers, batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from truestep.fingerprint.sums import combine
from truestep.fingerprint.tensors import fingerprint_tensor, fingerprint_tensors

_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def named_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> tensor of everything that healthy replicas agree on: parameters, and buffers but for running statistics.

    Running statistics (BatchNorm and its like) follow the local batches, so they differ on healthy ranks.
    """
    agreeing = {
        name: buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] not in _RUNNING_STATISTICS
    }
    return {**dict(module.named_parameters()), **agreeing}


def fingerprint_model(module: nn.Module) -> tuple[str, dict[str, str]]:
    """(combined, {name: printed fingerprint}) over `named_state` of the module, or of the module inside DDP."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    table = fingerprint_tensors(named_state(module))
    return combine(table), table


def optimizer_state_tensors(
    optimizer: torch.optim.Optimizer, module: nn.Module | None = None
) -> dict[str, torch.Tensor | str]:
    """``parameter/key`` -> tensor (or text of a number) of the optimizer's state and hyperparameters.

    module: names the parameters; without it they are called by their place, ``group.index``.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    table: dict[str, torch.Tensor | str] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for key in sorted(group):
            if key not in ("params", "param_names"):
                table[f"group {group_index}/{key}"] = _leaf(group[key])
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{group_index}.{index}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                table[f"{name}/{key}"] = _leaf(value)
    return table


def fingerprint_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module | None = None
) -> tuple[str, dict[str, str]]:
    """(combined, {``parameter/key``: fingerprint}) over the optimizer's state and hyperparameters.

    Before the first update there is no state, so only hyperparameters enter. The order of creation does not matter.
    """
    leaves = optimizer_state_tensors(optimizer, module)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    table = fingerprint_tensors(tensors)
    table.update({name: leaf for name, leaf in leaves.items() if isinstance(leaf, str)})
    return combine(table), table


def fingerprint_nested(value: Any) -> str:
    """One fingerprint over a batch: tensors by their bits, dtype and shape; containers by structure; the rest by
    repr."""
    digest = hashlib.sha256()
    for path, leaf in _walk("", value):
        digest.update(f"{path}\0{leaf}\0".encode())
    return digest.hexdigest()[:32]


def fingerprint_leaves(value: Any) -> dict[str, str]:
    """Path -> fingerprint of every leaf of a batch, such as ``[0]`` or ``.tokens``; containers by their size."""
    return dict(_walk("", value))


def _leaf(value: Any) -> torch.Tensor | str:
    if isinstance(value, torch.Tensor):
        return value
    return value.hex() if isinstance(value, float) else repr(value)


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield path, f"{value.dtype} {tuple(value.shape)} {fingerprint_tensor(value)}"
    elif isinstance(value, Mapping):
        yield path, f"mapping of {len(value)}"
        for key, item in value.items():
            yield from _walk(f"{path}.{key}", item)
    elif isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        # A generator's state is hundreds of integers: one leaf for all, or they cost a tenth of an audit.
        yield path, f"integers {list(value)}"
    elif isinstance(value, (list, tuple)):
        yield path, f"sequence of {len(value)}"
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _walk(path, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif hasattr(value, "__dict__"):
        yield from _walk(path, vars(value))
    else:
        yield path, value.hex() if isinstance(value, float) else repr(value)
