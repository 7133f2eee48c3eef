"""Every operation of one pass with a fingerprint of its result: two traces of the same pass show what is not the same.

Costs about as much as fingerprinting all activations, so it runs only once something is known to differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from truestep.fingerprint import fingerprint_tensor

_UNINITIALISED = ("empty", "new_empty", "resize")
"""Their results hold whatever lay in memory."""
_LOSS = "compute_loss"


@dataclass(frozen=True)
class Operation:
    """One kernel that ran."""

    place: str
    """Module (with its class) or ``compute_loss``; ``backward of ...`` there."""
    kernel: str
    """``aten.put_``, and the autograd node in a backward."""
    digest: str
    """Fingerprints of its results."""

    def __str__(self) -> str:
        return f"{self.kernel} in {self.place}"


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager around a pass. Compiled modules run eagerly inside."""

    def __init__(self, module: nn.Module) -> None:
        """module: whose submodules give the places their names."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._names = {child: name for name, child in module.named_modules()}
        self._stack: list[str] = []
        self._places: dict[int, str] = {}
        self._handles: list[Any] = []
        self._in_backward = False

    def __enter__(self) -> OperationTrace:
        for child in self._names:
            self._handles.append(child.register_forward_pre_hook(self._enter_module))
            self._handles.append(child.register_forward_hook(self._leave_module, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.replace("::", ".")
        node = torch._C._current_autograd_node()
        self._in_backward |= node is not None
        # At leaves and after the backward it is our own fingerprinting that runs.
        ours = self._in_backward and (node is None or "AccumulateGrad" in node.name())
        if not ours and not name.partition(".")[2].startswith(_UNINITIALISED):
            place, kernel = self._whereabouts(name, node)
            self.operations.append(Operation(place, kernel, _digest(result)))
        return result

    def _whereabouts(self, name: str, node: Any) -> tuple[str, str]:
        if node is None:
            place = self._stack[-1] if self._stack else _LOSS
            # The node of a differentiable operation was made just before its kernel runs, with the last number given.
            self._places[torch._C._autograd._get_sequence_nr() - 1] = place
            return place, name
        return f"backward of {self._places.get(node._sequence_nr(), _LOSS)}", f"{name} ({node.name()})"

    def _enter_module(self, child: nn.Module, _arguments: Any) -> None:
        self._stack.append(f"{self._names[child] or 'the model'} ({type(child).__name__})")

    def _leave_module(self, _child: nn.Module, _arguments: Any, _output: Any) -> None:
        self._stack.pop()


def first_difference(one: Sequence[Operation], other: Sequence[Operation]) -> Operation | None:
    """The first operation of `other` whose result is not that of `one`; None where all are equal."""
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            return theirs
    return other[len(one)] if len(other) > len(one) else None


def operation_of(kernel_warning: str, operations: Sequence[Operation]) -> Operation | None:
    """The operation that a warning about a kernel without deterministic version speaks of, by its name."""
    kernel = (kernel_warning.split() or [""])[0]
    found = [
        (len(base), operation)
        for operation in operations
        if (base := operation.kernel.split(" ")[0].partition(".")[2].rstrip("_")) and kernel.startswith(base)
    ]
    return max(found, key=lambda entry: entry[0])[1] if found else None


def _digest(result: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]
    return " ".join(str(fingerprint_tensor(tensor)) for tensor in tensors)
