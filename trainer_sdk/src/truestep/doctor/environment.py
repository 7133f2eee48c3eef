"""What must be equal on all ranks, or may not be in the model at all, and can be told without running anything."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import ARBITRATION_NODES, Attachment
from truestep.checks.buckets import unreplayable_modules
from truestep.contract import Rank
from truestep.contract.words import counted
from truestep.doctor.diagnosis import Level, Observation
from truestep.identity import software_differences
from truestep.judge_words import ranks_text

_SETTING = "CUBLAS_WORKSPACE_CONFIG"


def examine_environment(attachment: Attachment) -> list[Observation]:
    """Versions, devices, threads and numerical settings of all ranks. Collective."""
    rows = attachment.cpu_group.gather_rows(numerical_settings())
    differences = software_differences(attachment.identities) + settings_differences(rows)
    found = [
        Observation(
            subject="environment",
            level=Level.REFUSED,
            message=f"ranks cannot be compared bit for bit: {difference}; make it the same on all (one image, one "
            "instance type, one set of environment variables)",
        )
        for difference in differences
    ]
    nodes = len(set(attachment.nodes.values()))
    if nodes < ARBITRATION_NODES:
        message = (
            f"{counted(nodes, 'node')}: a fault is detected, and who computed wrongly stays open; "
            f"naming the faulty node takes {ARBITRATION_NODES}"
        )
        found.append(Observation(subject="nodes", level=Level.NOTE, message=message))
    if torch.cuda.is_available() and os.environ.get(_SETTING) not in (":4096:8", ":16:8"):
        message = (
            f"{_SETTING} is not set, so matrix products on several streams may not repeat: set it to :4096:8 in every "
            "pod; until then audits compare losses only"
        )
        found.append(Observation(subject="environment", level=Level.LOSS_ONLY, message=message))
    return found


def numerical_settings() -> dict[str, str]:
    """Name -> value of what changes bits on this process beside what the identity row has."""
    numpy = sys.modules.get("numpy")
    return {
        "Python": platform.python_version(),
        "numpy": str(numpy.__version__) if numpy is not None else "not imported",
        "torch's build": str(getattr(torch.version, "git_version", "")),
        "CPU instruction set": torch.backends.cpu.get_cpu_capability(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        _SETTING: os.environ.get(_SETTING, "not set"),
    }


def settings_differences(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for every setting in which ranks differ."""
    differences = []
    for name in rows[0]:
        ranks: dict[str, list[Rank]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(row[name], []).append(Rank(rank))
        if len(ranks) > 1:
            # The smaller groups are what somebody has to look for.
            groups = sorted(ranks.items(), key=lambda entry: len(entry[1]))
            parts = (f"{value} on {ranks_text(members)}" for value, members in groups)
            differences.append(f"{name} is {', '.join(parts)}")
    return differences


def examine_modules(ddp_model: DistributedDataParallel) -> list[Observation]:
    """Modules that one rank alone cannot run, and ways of compiling that a replay cannot repeat."""
    found = []
    blocked = unreplayable_modules(ddp_model.module)
    if blocked:
        message = (
            f"SyncBatchNorm ({', '.join(blocked[:4])}) communicates in its forward, so that one rank alone cannot "
            "replay it: use BatchNorm or GroupNorm, or set Schedule(audit_every=None)"
        )
        found.append(Observation(subject="modules", level=Level.REFUSED, message=message))
    in_place = [name or "the model" for name, child in ddp_model.named_modules() if _compiled_in_place(child)]
    if in_place and _splits_graphs():
        message = (
            f"{in_place[0]} was compiled in place (module.compile()), and DDP splits its graph where a replay does "
            "not: set torch._dynamo.config.optimize_ddp = False before the first forward, or wrap the compiled module, "
            "DistributedDataParallel(torch.compile(model)); until then audits compare losses only"
        )
        found.append(Observation(subject="compilation", level=Level.LOSS_ONLY, message=message))
    return found


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _splits_graphs() -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is None or bool(dynamo.config.optimize_ddp)
