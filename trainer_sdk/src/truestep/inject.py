"""Software faults for tests and demonstrations: what a faulty device does to numbers, scripted.

A fault sits on a process as a defect sits on a device: it also hits the replays that run there, because forward hooks
fire inside `functional_call`.
"""

from __future__ import annotations

import difflib
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import attachment_of
from truestep.contract import ContractError, from_json, to_json

FAULT_VARIABLE = "TRUESTEP_SIMULATED_FAULT"
SHOWN_NAMES = 20
_SITES = ("module_output", "gradient", "parameter_gradient", "reduced_gradient", "weight", "optimizer_state")
_MODELS = ("bit_flip", "stuck", "null", "relative", "nan", "inf")
_PHASES = ("any", "training", "replay")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One scripted fault. Raises `ValueError` for a field that makes no sense."""

    site: str
    """``module_output`` (forward), ``gradient`` (of a module's output, in the backward), ``parameter_gradient`` (as it
    leaves the backward), ``reduced_gradient`` (a bucket as this rank receives it; the same fault on every rank is a
    wrong sum that all received alike), ``weight`` or ``optimizer_state`` (in memory, right after the update)."""
    target: str
    """Name of a module for the first two, of a parameter for ``parameter_gradient`` and ``weight``, the bucket's index
    for ``reduced_gradient``, ``parameter/key`` for ``optimizer_state``."""
    model: str = "bit_flip"
    """``bit_flip``, ``stuck`` (the bit reads one), ``null`` (the value reads zero), ``relative`` (times 1 +
    `magnitude`), ``nan`` or ``inf``."""
    element: int = 0
    """Flat index into the tensor, modulo its size."""
    elements: int = 1
    """Length of the run of neighbours that are hit, from `element` on."""
    bit: int = 30
    """For ``bit_flip`` and ``stuck``: 0 is the lowest; 30 of a float32 is the exponent's highest."""
    magnitude: float = 5e-4
    """For ``relative``."""
    phase: str = "any"
    """``training`` or ``replay``: hit only the passes of the training itself, or only replays of others' work."""
    first_step: int = 0
    last_step: int | None = None
    """Inclusive; None: for ever."""
    passes: int | None = None
    """Hit at most this many times; None: without limit."""
    probability: float = 1.0
    """Of each pass (or update) inside the window to be hit."""
    seed: int = 0
    """Of the fault's own random numbers, for probabilities below 1."""

    def __post_init__(self) -> None:
        if self.site not in _SITES:
            raise ValueError(f"fault site {self.site!r} is not one of {', '.join(_SITES)}")
        if self.model not in _MODELS:
            raise ValueError(f"fault model {self.model!r} is not one of {', '.join(_MODELS)}")
        if self.phase not in _PHASES:
            raise ValueError(f"fault phase {self.phase!r} is not one of {', '.join(_PHASES)}")
        if self.elements < 1:
            raise ValueError(f"fault elements {self.elements} must be at least 1")
        if not 0 <= self.bit < 64 or self.element < 0:
            raise ValueError(
                f"fault bit {self.bit} and element {self.element} must not be negative, nor the bit above 63"
            )
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"fault probability {self.probability} must lie above 0 and not above 1")
        if self.passes is not None and self.passes < 1:
            raise ValueError(f"fault passes {self.passes} must be at least 1, or null for no limit")
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(f"fault window ends (step {self.last_step}) before it begins (step {self.first_step})")
        if self.site == "reduced_gradient" and not self.target.isdecimal():
            raise ValueError(
                f"a reduced_gradient fault's target is a bucket's index, for example 0; got {self.target!r}"
            )
        if self.site == "optimizer_state" and "/" not in self.target:
            raise ValueError(
                f"an optimizer_state fault's target is parameter/key, for example w/exp_avg_sq; got {self.target!r}"
            )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads back."""
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Fault:
        """Raises `ContractError` for a field that is missing, mistyped or makes no sense."""
        return from_json(cls, document)


class ArmedFault:
    """A fault in place. `firings` counts values that really changed, so that a test can assert that it fired."""

    def __init__(self, fault: Fault, current_step: Callable[[], int], replaying: Callable[[], bool]) -> None:
        """Made by `arm`."""
        self.fault = fault
        self.firings = 0
        self.steps: list[int] = []
        """Step of each firing."""
        self._current_step = current_step
        self._replaying = replaying
        self.suspended = False
        """True: the fault rests, and its random numbers with it; for an oracle that computes what would be right."""
        # A stream of its own: drawing from the global one would change the training that it disturbs.
        self._random = random.Random(fault.seed)  # noqa: S311 - reproducible, not secret
        self._handles: list[Any] = []

    def remove(self) -> None:
        """Take the fault away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def strikes(self) -> bool:
        """Whether this pass is hit; advances the fault's random numbers inside the window."""
        if self.suspended or (self.fault.phase != "any" and self._replaying() != (self.fault.phase == "replay")):
            return False
        step = self._current_step()
        if self.fault.passes is not None and self.firings >= self.fault.passes:
            return False
        if step < self.fault.first_step or (self.fault.last_step is not None and step > self.fault.last_step):
            return False
        return self.fault.probability >= 1.0 or self._random.random() < self.fault.probability

    @torch.no_grad()
    def corrupt_(self, tensor: torch.Tensor) -> None:
        """Change the fault's elements of a tensor in place; counts as one firing where a bit really changed."""
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else None
        if flat is None or flat.numel() == 0:
            raise ValueError(f"fault target {self.fault.target!r} is not a contiguous tensor with elements")
        run = min(self.fault.elements, flat.numel())
        indices = (self.fault.element + torch.arange(run, device=flat.device)) % flat.numel()
        before = flat[indices]
        after = self._changed(before.clone())
        flat[indices] = after
        if not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
            self.firings += 1
            self.steps.append(self._current_step())

    def _changed(self, values: torch.Tensor) -> torch.Tensor:
        model = self.fault.model
        if model in ("nan", "inf", "null"):
            return values.fill_({"nan": float("nan"), "inf": float("inf"), "null": 0}[model])
        if model == "relative":
            return values.mul_(1 + self.fault.magnitude)
        lanes = values.view(_INTEGERS[values.element_size()])
        bit = self.fault.bit % (8 * values.element_size())
        mask = torch.bitwise_left_shift(torch.ones((), dtype=lanes.dtype, device=lanes.device), bit)
        return (lanes ^ mask if model == "bit_flip" else lanes | mask).view(values.dtype)


class _CorruptForward(torch.autograd.Function):
    """The output with one element changed; gradients pass through, as they would on a device that never noticed."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor, armed: ArmedFault) -> torch.Tensor:
        changed = value.clone(memory_format=torch.contiguous_format)
        armed.corrupt_(changed)
        return changed

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def arm(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    fault: Fault,
    *,
    current_step: Callable[[], int] | None = None,
) -> ArmedFault:
    """Put the fault into this process. current_step: default, the step that the attached model's guard works on.

    Raises `ValueError` where the target does not exist, and for a model that was not attached and no `current_step`.
    """
    if current_step is None:
        attachment = attachment_of(ddp_model)
        current_step = lambda: attachment.current_step  # noqa: E731
    original = next(ddp_model.module.parameters())
    # A replay runs over aliases of the parameters (truestep.replay).
    armed = ArmedFault(fault, current_step, lambda: next(ddp_model.module.parameters()) is not original)
    if fault.site == "parameter_gradient":
        _arm_parameter_gradient(ddp_model.module, armed)
    elif fault.site == "reduced_gradient":
        _arm_reduction(ddp_model, armed)
    elif fault.site in ("module_output", "gradient"):
        module = _named(dict(ddp_model.module.named_modules()), fault.target, "module")
        hook = _corrupt_output if fault.site == "module_output" else _corrupt_gradient
        armed._handles.append(module.register_forward_hook(lambda _m, _i, output: hook(armed, output)))
    else:
        _arm_memory(ddp_model.module, optimizer, armed)
    return armed


def from_environment(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    current_step: Callable[[], int] | None = None,
) -> ArmedFault | None:
    """Arm the fault that the stand-in kubelet put into `TRUESTEP_SIMULATED_FAULT` (JSON); None where there is none.

    current_step: as for `arm`. Raises `ContractError`, naming the variable, for a text that is not the JSON of a
    `Fault`, and for a fault that cannot be armed here.
    """
    text = os.environ.get(FAULT_VARIABLE)
    if not text:
        return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ContractError(f"{FAULT_VARIABLE} is not JSON: {error}") from error
    try:
        _refuse_unknown_fields(document)
        return arm(ddp_model, optimizer, Fault.from_json(document), current_step=current_step)
    except (ContractError, ValueError) as error:
        raise ContractError(f"{FAULT_VARIABLE} cannot be used: {error}") from error


def _refuse_unknown_fields(document: Any) -> None:
    """The contract passes over fields of later releases; here one is a slip of the pen, and the fault another."""
    known = {field.name for field in fields(Fault)}
    unknown = sorted(document.keys() - known) if isinstance(document, dict) else []
    if unknown:
        raise ContractError(f"no field is named {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def _arm_parameter_gradient(module: nn.Module, armed: ArmedFault) -> None:
    owner_name, _, name = armed.fault.target.rpartition(".")
    _named(dict(module.named_parameters()), armed.fault.target, "parameter")
    owner = module.get_submodule(owner_name)
    original = getattr(owner, name)
    listener = _gradient_listener(armed)
    armed._handles.append(original.register_hook(listener))

    def before_forward(*_: Any) -> None:
        alias = getattr(owner, name)
        if alias is not original and alias.requires_grad:
            # In front of whoever fingerprints what arrives: the device was wrong before anyone could look. Autograd
            # reads the order of insertion, so moving our entry to the front would not do.
            hooks = dict(alias._backward_hooks or {})
            if hooks:
                alias._backward_hooks.clear()
            alias.register_hook(listener)
            alias._backward_hooks.update(hooks)

    armed._handles.append(owner.register_forward_pre_hook(before_forward))


class _Restore:
    """Puts a replaced method back."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def remove(self) -> None:
        """Restore the class's own."""
        delattr(self._owner, self._name)


def _arm_reduction(ddp_model: DistributedDataParallel, armed: ArmedFault) -> None:
    sensor = attachment_of(ddp_model).sensor
    original, target = sensor._reduced_bucket, int(armed.fault.target)

    def corrupted(index: int, value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        if index == target and armed.strikes():
            armed.corrupt_(value[0] if isinstance(value, (list, tuple)) else value)
        return original(index, value)

    sensor._reduced_bucket = corrupted  # type: ignore[method-assign]
    armed._handles.append(_Restore(sensor, "_reduced_bucket"))


def _arm_memory(module: nn.Module, optimizer: torch.optim.Optimizer, armed: ArmedFault) -> None:
    name, _, key = (
        armed.fault.target.rpartition("/") if armed.fault.site == "optimizer_state" else (armed.fault.target, "", "")
    )
    parameter = _named(dict(module.named_parameters()), name, "parameter")

    def after_step(_optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        if not armed.strikes():
            return
        if armed.fault.site == "weight":
            armed.corrupt_(parameter.data)
        else:
            armed.corrupt_(_named(dict(optimizer.state[parameter]), key, "optimizer state"))

    armed._handles.append(optimizer.register_step_post_hook(after_step))


def _corrupt_output(armed: ArmedFault, output: Any) -> Any:
    tensor = _first_tensor(output, armed)
    if not armed.strikes():
        return output
    changed = _CorruptForward.apply(tensor, armed)  # type: ignore[no-untyped-call]
    if isinstance(output, torch.Tensor):
        return changed
    return type(output)([changed, *output[1:]])


def _corrupt_gradient(armed: ArmedFault, output: Any) -> None:
    tensor = _first_tensor(output, armed)
    if tensor.requires_grad:
        tensor.register_hook(_gradient_listener(armed))  # type: ignore[no-untyped-call]


def _gradient_listener(armed: ArmedFault) -> Callable[[torch.Tensor], torch.Tensor]:
    def arrived(gradient: torch.Tensor) -> torch.Tensor:
        if not armed.strikes():
            return gradient
        changed = gradient.clone(memory_format=torch.contiguous_format)
        armed.corrupt_(changed)
        return changed

    return arrived


def _first_tensor(output: Any, armed: ArmedFault) -> torch.Tensor:
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"module {armed.fault.target!r} returns {type(output).__name__}; a fault needs a tensor")
    return first


def _named(found: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in found:
        raise ValueError(f"a fault's target is {name!r}, and no {kind} has that name; {_listed(found, name)}")
    return found[name]


def _listed(found: Mapping[str, Any], name: str) -> str:
    """Names that exist; of many those that are most like `name`, if any is."""
    names = sorted(filter(None, found))
    likely = names if len(names) <= SHOWN_NAMES else difflib.get_close_matches(name, names, SHOWN_NAMES, 0.3)
    shown = likely or names[:SHOWN_NAMES]
    more = len(names) - len(shown)
    parts = [f"there are {', '.join(shown)}{f' and {more} more' if more else ''}" if shown else "there is none"]
    if "" in found:
        parts.append("an empty target is the whole model")
    return "; ".join(parts)
