"""Fingerprints of what training carries from step to step: models, optimizers, batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from truestep.fingerprint.table import FingerprintTable
from truestep.fingerprint.tensors import fingerprint_tensors

_PRINTED = (str, bytes, bytearray, bool, int, float, complex, Enum, PurePath)
"""Their repr says all. Some keep caches in attributes, or attributes beside their value."""
_SPARSE_PARTS = {
    # Of the tensor as it is: coalescing computes.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def named_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """`module.named_buffers()`, at a tenth of its cost where there are none, as in most transformers."""
    seen, left = {module}, [module]
    while left:
        part = left.pop()
        if part._buffers:
            return dict(module.named_buffers())
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)
    return {}


def agreeing_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> buffer, but for running statistics (BatchNorm and its like): these follow the local batches, so they
    differ on healthy ranks."""
    buffers = named_buffers(module).items()
    return {
        part_name: part
        for name, buffer in buffers
        if name.rpartition(".")[2] not in _RUNNING_STATISTICS
        for part_name, part in _strided_parts(name, buffer)
    }


def _strided_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What holds the tensor's data: of a sparse one its indices and values, of one on meta nothing."""
    if tensor.is_meta:
        return
    if tensor.layout is torch.strided:
        yield name, tensor
        return
    for part in _SPARSE_PARTS.get(tensor.layout, ()):
        yield f"{name}.{part.strip('_')}", getattr(tensor, part)()


def named_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> tensor of everything that healthy replicas agree on: parameters and `agreeing_buffers`."""
    return {**dict(module.named_parameters()), **agreeing_buffers(module)}


def fingerprint_model(module: nn.Module) -> tuple[str, dict[str, str]]:
    """(combined, {name: printed fingerprint}) over `named_state` of the module, or of the module inside DDP."""
    table = fingerprint_weights(module)
    return table.combined, dict(table)


def fingerprint_weights(module: nn.Module, *, without: Set[str] = frozenset()) -> FingerprintTable:
    """Fingerprints over `named_state` of the module, or of the module inside DDP. without: names to leave out."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    state = named_state(module)
    for name in without:
        state.pop(name, None)
    return fingerprint_tensors(state)


def optimizer_state_tensors(
    optimizer: torch.optim.Optimizer, module: nn.Module | None = None
) -> dict[str, torch.Tensor | str]:
    """``parameter/key`` -> tensor (or text of a number) of the optimizer's state and hyperparameters; functions and
    other objects among them by their names alone.

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
    table = fingerprint_tensors(optimizer_state_tensors(optimizer, module))
    return table.combined, dict(table)


def fingerprint_nested(value: Any) -> str:
    """One fingerprint over a batch: tensors and NumPy arrays by their bits, dtype and shape; containers and objects by
    structure; sets whatever their order; the rest by repr.

    Raises `TypeError` with the place of a value that only has an address to show.
    """
    digest = hashlib.sha256()
    for path, leaf in _leaves(value):
        digest.update(f"{path}\0{leaf}\0".encode())
    return digest.hexdigest()[:32]


def fingerprint_leaves(value: Any) -> dict[str, str]:
    """Path -> fingerprint of every leaf of a batch, such as ``[0]`` or ``.tokens``; containers by their size."""
    return dict(_leaves(value))


def _leaves(value: Any) -> list[tuple[str, str]]:
    """(path, what is compared); all tensors in one call, which costs a third of as many single ones."""
    walked = list(_walk("", value))
    printed = fingerprint_tensors({str(place): leaf for place, (_, leaf) in enumerate(walked)})
    return [
        (path, leaf if isinstance(leaf, str) else f"{leaf.dtype} {tuple(leaf.shape)} {printed[str(place)]}")
        for place, (path, leaf) in enumerate(walked)
    ]


def is_data(value: Any) -> bool:
    """Whether a setting is numbers, text, tensors, arrays or containers of these: what ranks can compare and ship.

    Anything else is code that every rank has itself. What it shows may be an address, and what it holds a rank's own.
    """
    if isinstance(value, (torch.Tensor, *_PRINTED)) or value is None or hasattr(value, "__array_interface__"):
        return True
    if isinstance(value, Mapping):
        return all(map(is_data, value.values()))
    return isinstance(value, (list, tuple, deque, Set)) and all(map(is_data, value))


def _leaf(value: Any) -> torch.Tensor | str:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, _PRINTED) or value is None:
        return value.hex() if isinstance(value, float) else repr(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, _PRINTED) for item in value):
        return repr(value)
    return fingerprint_nested(_named_code(value))


def _named_code(value: Any) -> Any:
    """The same with the names of functions and classes in place of what is no data."""
    if is_data(value):
        return value
    if isinstance(value, Mapping):
        return {key: _named_code(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_named_code(item) for item in value]
    if isinstance(value, Set):
        return sorted(fingerprint_nested(_named_code(item)) for item in value)
    named = value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _walk(path: str, value: Any) -> Iterator[tuple[str, str | torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout is not torch.strided:
            yield path, f"{value.layout} on {value.device.type} {value.dtype} {tuple(value.shape)}"
        yield from _strided_parts(path, value)
    elif isinstance(value, _PRINTED) or value is None:
        yield path, value.hex() if type(value) is float else repr(value)
    elif isinstance(value, Mapping):
        yield path, f"mapping of {len(value)}"
        for key, item in value.items():
            yield from _walk(f"{path}.{key}", item)
    elif isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        # A generator's state is hundreds of integers: one leaf for all, or they cost a tenth of an audit.
        yield path, f"integers {list(value)}"
    elif isinstance(value, (list, tuple, deque)):
        yield path, f"sequence of {len(value)}"
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item)
    elif isinstance(value, Set):
        # Strings hash differently in every process, so the order of a set means nothing.
        yield path, f"set {sorted(fingerprint_nested(item) for item in value)}"
    else:
        yield from _walk_object(path, value)


def _walk_object(path: str, value: Any) -> Iterator[tuple[str, str | torch.Tensor]]:
    if hasattr(value, "__array_interface__") and hasattr(value, "dtype"):
        yield from _walk_array(path, value)
        return
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        yield path, f"{value.__module__}.{value.__qualname__}"
        return
    parts = _attributes(value)
    if parts is not None:
        yield from _walk(path, parts)
        return
    shown = repr(value)
    if " at 0x" in shown:
        raise TypeError(
            f"the batch cannot be compared between ranks: {path or 'it'} is a {type(value).__module__}."
            f"{type(value).__qualname__} that shows nothing but its address; give tensors, arrays, numbers, text, "
            "containers of these, or objects with attributes"
        )
    yield path, shown


def _walk_array(path: str, value: Any) -> Iterator[tuple[str, str | torch.Tensor]]:
    if value.dtype.hasobject:
        yield from _walk(f"{path} objects {tuple(value.shape)}", value.reshape(-1).tolist())
    else:
        yield path, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:32]}"


def _attributes(value: Any) -> dict[str, Any] | None:
    """None for a value without any of its own."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    slots = [slot for kind in type(value).__mro__ for slot in slots_of(kind)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    held = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    return {**held, **getattr(value, "__dict__", {})}


def slots_of(kind: type) -> tuple[str, ...]:
    """Attributes that a class keeps in `__slots__`, under the names by which they are read."""
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )
