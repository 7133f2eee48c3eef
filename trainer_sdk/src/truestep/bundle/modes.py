"""What else decides the bits of a pass: library versions, the device, and switches of torch that choose kernels."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import truestep

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_COMPARED = ("torch", "cuda", "device")
_AUTOCAST_DEVICES = ("cpu", "cuda")
# Dotted places below torch. The fp32_precision switches stand for allow_tf32 as well, which raises where a run mixed
# the two interfaces.
_SWITCHES = (
    "utils.deterministic.fill_uninitialized_memory",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def versions(device: torch.device) -> dict[str, str]:
    """What must be equal on two machines for their bits to be comparable, and what is good to know."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "device": name,
        "python": platform.python_version(),
        "truestep": truestep.__version__,
    }


def version_differences(recorded: Mapping[str, str], device: torch.device) -> list[str]:
    """A sentence for every difference that makes bits incomparable."""
    here = versions(device)
    return [
        f"{name} is {here[name] or 'absent'} here and was {recorded.get(name) or 'absent'} in the run"
        for name in _COMPARED
        if here[name] != recorded.get(name, "")
    ]


def read_modes() -> dict[str, Any]:
    """The switches as they are in this process now. Plain JSON."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "switches": {path: value for path in _SWITCHES if (value := _read(path)) is not None},
        "attention": {name: bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) for name in _ATTENTION},
        "autocast": {
            device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        },
        WORKSPACE: os.environ.get(WORKSPACE, ""),
    }


@contextmanager
def applied_modes(modes: Mapping[str, Any]) -> Iterator[None]:
    """Set the switches as `read_modes` found them, and put back what was there. Also for a fresh thread."""
    before = read_modes()
    try:
        _set(modes)
        with ExitStack() as stack:
            for device in _AUTOCAST_DEVICES:
                dtype = modes["autocast"].get(device)
                stack.enter_context(
                    torch.autocast(device, dtype=getattr(torch, dtype))
                    if dtype
                    else torch.autocast(device, enabled=False)
                )
            yield
    finally:
        _set(before)


def _set(modes: Mapping[str, Any]) -> None:
    torch.use_deterministic_algorithms(modes["deterministic"], warn_only=modes["deterministic_warn_only"])
    # Unconditional: OpenMP keeps the number of threads for each calling thread apart.
    torch.set_num_threads(modes["num_threads"])
    torch.set_default_dtype(getattr(torch, modes["default_dtype"]))
    for path, value in modes["switches"].items():
        if _read(path) not in (None, value):
            owner, name = _owner(path)
            setattr(owner, name, value)
    for name, enabled in modes["attention"].items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


def _read(path: str) -> Any:
    owner, name = _owner(path)
    return getattr(owner, name, None)


def _owner(path: str) -> tuple[Any, str]:
    place: Any = torch
    *parents, name = path.split(".")
    for parent in parents:
        place = getattr(place, parent, None)
    return place, name
