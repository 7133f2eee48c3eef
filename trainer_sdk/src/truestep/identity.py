"""Who this process is: read from the downward API's environment and from torch, never guessed from names."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import torch

from truestep.checkpoints.storage import root_as_uri
from truestep.contract import IdentityRow, NodeName, Rank, RunRef


def local_identity(rank: int, attempt_id: str, environment: Mapping[str, str] | None = None) -> IdentityRow:
    """The identity row of this process. rank: in the data-parallel group. environment: default `os.environ`."""
    env = os.environ if environment is None else environment
    local_rank = _integer(env, "LOCAL_RANK", 0)
    return IdentityRow(
        rank=Rank(rank),
        local_rank=local_rank,
        node_name=NodeName(env.get("NODE_NAME") or platform.node()),
        pod_name=env.get("POD_NAME", ""),
        pod_uid=env.get("POD_UID", ""),
        namespace=env.get("POD_NAMESPACE", ""),
        job_name=env.get("TRUESTEP_JOB_NAME", ""),
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda or "",
        num_threads=torch.get_num_threads(),
        restart_count=_integer(env, "JOB_RESTART_COUNT", 0),
        cluster_arn=env.get("TRUESTEP_CLUSTER_ARN", ""),
        region=env.get("AWS_REGION", ""),
        attempt_id=attempt_id,
        **_device_fields(env),
    )


def run_reference(
    run_id: str, attempt_id: str, world_size: int, environment: Mapping[str, str] | None = None
) -> RunRef:
    """The run as the pod's environment describes it; ids come from rank 0, so that every rank says the same."""
    env = os.environ if environment is None else environment
    return RunRef(
        run_id=run_id,
        attempt_id=attempt_id,
        world_size=world_size,
        restart_count=_integer(env, "JOB_RESTART_COUNT", 0),
        cluster_arn=env.get("TRUESTEP_CLUSTER_ARN", ""),
        region=env.get("AWS_REGION", ""),
        namespace=env.get("POD_NAMESPACE", ""),
        job_name=env.get("TRUESTEP_JOB_NAME", ""),
        job_kind=env.get("TRUESTEP_JOB_KIND") or "HyperPodPyTorchJob",
        checkpoint_root=root_as_uri(env.get("TRUESTEP_CHECKPOINT_ROOT", "")),
    )


def software_differences(identities: Sequence[IdentityRow]) -> list[str]:
    """A sentence for every property in which ranks differ although bitwise comparison needs it equal. Empty:
    comparable."""
    differences = []
    for name in ("gpu_model", "torch_version", "cuda_version", "nccl_version", "num_threads"):
        ranks: dict[object, list[int]] = {}
        for row in identities:
            ranks.setdefault(getattr(row, name), []).append(row.rank)
        if len(ranks) > 1:
            parts = (f"{value!r} on ranks {_some(members)}" for value, members in ranks.items())
            differences.append(f"{name} is {', '.join(parts)}")
    return differences


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} is {text!r}; it must be an integer") from None


def _device_fields(env: Mapping[str, str]) -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"gpu_uuid": env.get("TRUESTEP_SIMULATED_GPU_UUID", "")}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(getattr(properties, "uuid", ""))
    domain, bus, device = (int(getattr(properties, f"pci_{part}_id", 0)) for part in ("domain", "bus", "device"))
    return {
        "gpu_uuid": uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}",
        "pci_address": f"{domain:08x}:{bus:02x}:{device:02x}.0",
        "gpu_model": properties.name,
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }
