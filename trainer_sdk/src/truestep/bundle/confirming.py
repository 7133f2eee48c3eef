"""Running a bundle's computation again, many times, on one device: how often and where the device differs."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from truestep import inject
from truestep.bundle.contents import BundleError, PartyResult
from truestep.bundle.modes import WORKSPACE, applied_modes, version_differences, versions
from truestep.bundle.reading import Bundle
from truestep.bundle.settings import require_factory_name
from truestep.bundle.trace import PassTrace, first_difference, untraceable
from truestep.bundle.writing import party_result
from truestep.checks.isolation import standing_group
from truestep.contract import ContractError, wilson_interval
from truestep.contract.words import counted
from truestep.fingerprint import fingerprint_tensors
from truestep.identity import local_identity
from truestep.replay import ComputeLoss, PassInputs, replay

SHOWN = 32
_WRAPPED = "module."
_STRIP = (
    "\nThese names are of a state_dict that was saved from the DDP model. The bundle brings the weights: leave the "
    "loading out, or save ddp_model.module.state_dict()"
)


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What repeating the computation on one device showed."""

    bundle_uri: str
    alarm_id: str
    step: int
    producer: int
    device: str
    gpu_uuid: str
    node_name: str
    versions: Mapping[str, str]
    runs: int
    """Passes that ran to their end."""
    differing: int
    """Of those, with another result than the reference."""
    as_recorded: int
    """Of the differing ones, with exactly the wrong result that a party computed in the audit."""
    reference: str
    """What was compared with, as a sentence."""
    settled: bool
    """Whether a majority computed the reference in the audit."""
    hit_rate: float
    hit_rate_low: float
    """Lower end of the 95% Wilson interval."""
    hit_rate_high: float
    losses_differing: int
    """Runs whose loss differed; the rest differed in gradients alone."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> runs in which its gradient differed; the first 32 by count."""
    parameters_differing: int = 0
    first_modules: Mapping[str, int] = field(default_factory=dict)
    """``phase module`` that first computed another value -> runs."""
    located: str = ""
    """Why `first_modules` says nothing, or empty."""
    weights_changed: tuple[str, ...] = ()
    """Parameters that read differently on the device than what was copied to it."""
    repeated: Mapping[str, int] = field(default_factory=dict)
    """Rank -> runs that gave what it recorded in the audit; the lowest of the ranks that recorded the same."""
    raised: str = ""
    """What ended the repetition early; empty where all runs ended."""
    version_differences: tuple[str, ...] = ()
    simulated_fault: bool = False

    @property
    def differs(self) -> bool:
        """Whether anything here was not as it should be."""
        return bool(self.differing or self.weights_changed or self.raised)


def usable_device(text: str) -> torch.device:
    """The device that `text` names, made current. Raises `BundleError` where there is none such."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise BundleError(f"device {text!r} is not one; give cpu, cuda or cuda:3") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BundleError(f"device {text!r} is not here: torch sees no such accelerator; give cpu or go to a GPU")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise BundleError(
            f"device {text!r} is not here: this machine has {counted(torch.cuda.device_count(), 'GPU')}, counted from 0"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def load_factory(text: str) -> tuple[nn.Module, ComputeLoss]:
    """Call ``module:function``; the model and the loss that it returns. Raises `BundleError` where it does not."""
    try:
        require_factory_name(text)
    except ValueError as error:
        raise BundleError(str(error)) from None
    module_name, _, function_name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look where it is started
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        built = function()
    except Exception as error:
        advice = _STRIP if f'"{_WRAPPED}' in str(error) and "state_dict" in str(error) else ""
        raise BundleError(f"model {text!r} cannot be built here: {type(error).__name__}: {error}{advice}") from error
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module) and callable(built[1])):
        raise BundleError(f"model {text!r} must return (model, compute_loss), a torch.nn.Module and a function")
    return built


def prepared_model(bundle: Bundle, model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, with the bundle's weights. Raises `BundleError` where it is not the run's model."""
    weights, recorded = bundle.parameters(), bundle.recorded
    own = dict(model.named_parameters())
    _require_same(weights, own, "parameters")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise BundleError(
                f"the model is not the run's: {name} is {tuple(parameter.shape)}, "
                f"the run's {tuple(weights[name].shape)}"
            )
        parameter.data = weights[name].clone()
        parameter.requires_grad_(name not in recorded.frozen)
    for name, child in model.named_modules():
        child.training = name not in recorded.evaluating
    return model.to(device)


def confirm(
    bundle: Bundle,
    model: nn.Module,
    compute_loss: ComputeLoss,
    device: torch.device,
    *,
    repeat: int,
    allow_version_mismatch: bool = False,
    allow_classes: bool = False,
    locate: bool = True,
    seconds: float = math.inf,
    on_run: Callable[[], None] | None = None,
) -> Confirmation:
    """Run the bundle's pass `repeat` times on `device` by the audit's own replay, and compare each bit for bit.

    seconds: start no other run after so long; at least one is made.
    locate: also fingerprint every module's output, which tells where a run first went wrong.
    on_run: called after each. A fault that the stand-in kubelet put into the environment is in place, as in training.
    Raises `BundleError` where nothing can be compared here.
    """
    differences = tuple(version_differences(bundle.manifest.versions, device))
    if differences and not allow_version_mismatch:
        raise BundleError(
            f"bits cannot be compared here: {'; '.join(differences)}. Run where versions and GPU model are those "
            "of the run; --allow-version-mismatch runs all the same, and a difference then proves nothing"
        )
    if repeat < 1:
        raise BundleError(f"repeat is {repeat}; give a number of runs of at least 1")
    _set_workspace(bundle.manifest.modes)
    model = prepared_model(bundle, model, device)
    inputs = bundle.inputs(device, allow_classes=allow_classes)
    if inputs.fingerprint() != bundle.manifest.inputs_fingerprint:
        raise BundleError(f"{bundle.uri}: the inputs read here are not those of the run; copy the bundle again")
    _require_same(inputs.buffers, {n: b for n, b in model.named_buffers() if not b.is_meta}, "buffers")
    fault = _standing_fault(model, int(bundle.manifest.step))
    expected, found = bundle.recorded.parameters, fingerprint_tensors(dict(model.named_parameters()))
    tally = _Tally(bundle, model, locate=locate)
    try:
        with applied_modes(bundle.manifest.modes), standing_group(inputs.rank, inputs.world_size):
            tally.repeat(model, inputs, compute_loss, repeat, seconds, on_run or (lambda: None))
    finally:
        if fault is not None:
            fault.remove()
    confirmation = tally.confirmation(device, differences)
    return replace(
        confirmation,
        weights_changed=tuple(sorted(name for name in expected if found[name] != expected[name])[:SHOWN]),
        simulated_fault=fault is not None,
    )


class _Tally:
    """Counts what the runs gave. Keeps one result of each kind, so that a million runs take no more memory than two."""

    def __init__(self, bundle: Bundle, model: nn.Module, *, locate: bool) -> None:
        recorded, manifest = bundle.recorded, bundle.manifest
        self._bundle = bundle
        self._known = {int(rank): self._compared(result) for rank, result in recorded.results.items()}
        unlocated = recorded.trace_missing if not recorded.trace else untraceable(model)
        self._unlocated = unlocated if locate else "not asked for"
        self._trace = PassTrace(model) if locate and not unlocated else None
        self._seen: list[tuple[PartyResult, str, int]] = []
        """(result, where it first differs from the writer's trace, runs)."""
        self._raised = ""
        self._reference = manifest.reference

    def repeat(
        self,
        model: nn.Module,
        inputs: PassInputs,
        compute_loss: ComputeLoss,
        runs: int,
        seconds: float,
        on_run: Callable[[], None],
    ) -> None:
        ends = time.monotonic() + seconds
        try:
            for index in range(runs):
                if index and time.monotonic() >= ends:
                    return
                try:
                    result = party_result(replay(model, inputs, compute_loss))
                    place = self._first_place()
                except Exception as error:
                    if index == 0:
                        raise BundleError(
                            f"the computation cannot be run here: {type(error).__name__}: {error}"[:500]
                        ) from error
                    self._raised = f"run {index + 1} raised {type(error).__name__}: {error}"[:500]
                    return
                self._count(self._compared(result), place)
                on_run()
        finally:
            if self._trace is not None:
                self._trace.close()

    def confirmation(self, device: torch.device, differences: tuple[str, ...]) -> Confirmation:
        manifest, identity = self._bundle.manifest, local_identity(0, "")
        reference, sentence = self._settle_reference()
        wrong = [(result, place, runs) for result, place, runs in self._seen if result != reference]
        runs, differing = sum(runs for _, _, runs in self._seen), sum(runs for _, _, runs in wrong)
        parameters: Counter[str] = Counter()
        for result, _, count in wrong:
            for name in sorted({*result.gradients, *reference.gradients}):
                if result.gradients.get(name) != reference.gradients.get(name):
                    parameters[name] += count
        places: Counter[str] = Counter()
        for _, place, count in wrong:
            places[place] += count
        others = [result for result in self._known.values() if result != reference]
        low, high = wilson_interval(differing, runs)
        return Confirmation(
            bundle_uri=self._bundle.uri,
            alarm_id=manifest.alarm_id,
            step=int(manifest.step),
            producer=int(manifest.producer),
            device=str(device),
            gpu_uuid=identity.gpu_uuid,
            node_name=str(identity.node_name),
            versions=versions(device),
            runs=runs,
            differing=differing,
            as_recorded=sum(count for result, _, count in wrong if result in others),
            reference=sentence,
            settled=manifest.reference is not None,
            hit_rate=differing / runs if runs else 0.0,
            hit_rate_low=low,
            hit_rate_high=high,
            losses_differing=sum(count for result, _, count in wrong if result.loss != reference.loss),
            parameters=dict(parameters.most_common(SHOWN)),
            parameters_differing=len(parameters),
            first_modules={} if self._unlocated else {place: n for place, n in places.most_common(SHOWN) if place},
            located=self._unlocated,
            repeated=self._repeated(),
            raised=self._raised,
            version_differences=differences,
        )

    def _settle_reference(self) -> tuple[PartyResult, str]:
        manifest = self._bundle.manifest
        if manifest.reference is not None:
            rank = int(manifest.reference)
            agreeing = sum(result == self._known[rank] for result in self._known.values())
            return self._known[rank], f"what {agreeing} of the {len(self._known)} ranks that ran it computed"
        # Nothing settled who was right: what this device gives most often, if a rank gave it too.
        often = Counter({rank: self._runs_of(result) for rank, result in sorted(self._known.items())})
        rank = often.most_common(1)[0][0]
        return self._known[rank], f"what rank {rank} computed; nothing settled which of the ranks was right"

    def _repeated(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for result, _, runs in self._seen:
            rank = next((rank for rank, known in sorted(self._known.items()) if known == result), None)
            if rank is not None:
                found[str(rank)] = found.get(str(rank), 0) + runs
        return found

    def _runs_of(self, wanted: PartyResult) -> int:
        return sum(runs for result, _, runs in self._seen if result == wanted)

    def _count(self, result: PartyResult, place: str) -> None:
        for index, (known, where, runs) in enumerate(self._seen):
            if (known, where) == (result, place):
                self._seen[index] = (known, where, runs + 1)
                return
        self._seen.append((result, place, 1))

    def _first_place(self) -> str:
        if self._trace is None:
            return ""
        event = first_difference(self._bundle.recorded.trace, self._trace.take())
        return f"{event.phase} {event.module}" if event else ""

    def _compared(self, result: PartyResult) -> PartyResult:
        """The part of a result that the audit compared, in one form."""
        manifest = self._bundle.manifest
        return PartyResult(
            loss=result.loss if manifest.compares_loss else "",
            loss_value="",
            gradients={name: tuple(v) for name, v in result.gradients.items()} if manifest.compares_gradients else {},
        )


def _require_same(wanted: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    absent, extra = sorted(set(wanted) - set(own)), sorted(set(own) - set(wanted))
    if (absent or extra) and sorted(name.removeprefix(_WRAPPED) for name in own) == sorted(wanted):
        raise BundleError(
            "the model is still wrapped in DistributedDataParallel: return (ddp_model.module, compute_loss), the model "
            "inside it, whose names do not begin with 'module.'"
        )
    if absent or extra:
        raise BundleError(
            f"the model is not the run's: {what} missing {absent[:4]}, {what} too many {extra[:4]}; build it as it is "
            "inside DDP (compiled, if it was)"
        )


class _Stage:
    """Stands where training has the DDP model, for a fault that is put on the module inside it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class _NoUpdates:
    """Stands where training has the optimizer: a fault that waits for updates never strikes here."""

    def register_step_post_hook(self, _hook: Any) -> _NoUpdates:
        return self

    def remove(self) -> None:
        """There is nothing to take away."""


def _standing_fault(model: nn.Module, step: int) -> inject.ArmedFault | None:
    """The stand-in node's fault, which sits on this process as on any other there."""
    try:
        stage, updates = cast(Any, _Stage(model)), cast(Any, _NoUpdates())
        return inject.from_environment(stage, updates, current_step=lambda: step)
    except (ValueError, ContractError) as error:
        raise BundleError(f"the simulated fault in {inject.FAULT_VARIABLE} does not fit this model: {error}") from error


def _set_workspace(modes: Mapping[str, Any]) -> None:
    wanted = modes.get(WORKSPACE, "")
    if wanted and not os.environ.get(WORKSPACE):
        os.environ[WORKSPACE] = wanted  # read once, when cuBLAS starts
