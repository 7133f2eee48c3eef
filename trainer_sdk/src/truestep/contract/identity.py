"""Who a rank is, in terms that a cluster operator can find again."""

from __future__ import annotations

from dataclasses import dataclass

from truestep.contract.types import NodeName, Rank


@dataclass(frozen=True, kw_only=True)
class IdentityRow:
    """One rank's identity, all-gathered at attach. A pod's index is not its rank: nothing is guessed from names."""

    rank: Rank
    local_rank: int
    node_name: NodeName
    pod_name: str = ""
    pod_uid: str = ""
    namespace: str = ""
    job_name: str = ""
    gpu_uuid: str = ""
    """``GPU-...`` as NVML prints it; empty on a CPU without a simulated one."""
    pci_address: str = ""
    gpu_model: str = ""
    driver_version: str = ""
    torch_version: str = ""
    cuda_version: str = ""
    nccl_version: str = ""
    num_threads: int = 0
    """Intra-op threads: on a CPU their number changes the result of sums."""
    restart_count: int = 0
    cluster_arn: str = ""
    region: str = ""
    attempt_id: str = ""
