"""Started by test_several_ranks, one process a rank: prints one JSON line with what this rank saw."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "trainer_sdk" / "src"))

import torch
import torch.distributed as dist
from torch import nn

from truestep.checkpoints import VerifiedCheckpoints, background
from truestep.collectives import CpuGroup
from truestep.contract import IdentityRow, NodeName, Rank, ResumeDirective, RunRef, Step, TruestepError
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.protocols import ResumePoint, SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter
from truestep.resumption import resume


@dataclass
class AttachedRun:
    cpu_group: CpuGroup
    run: RunRef
    identities: tuple[IdentityRow, ...]
    resumed: ResumePoint | None = None

    @property
    def rank(self) -> int:
        return self.cpu_group.rank

    @property
    def world_size(self) -> int:
        return self.cpu_group.size


class OneRank:
    """One rank of one start of the run."""

    def __init__(self, root_uri: str, outbox: Path, seed: int, **arguments: Any) -> None:
        assert dist.group.WORLD is not None
        group = CpuGroup(dist.group.WORLD)
        attempt_id = json.loads(group.broadcast_bytes(json.dumps(uuid.uuid4().hex).encode(), 0))
        run = RunRef(run_id="run", attempt_id=attempt_id, world_size=group.size, checkpoint_root=root_uri)
        rows = tuple(IdentityRow(rank=Rank(r), local_rank=0, node_name=NodeName(f"n{r}")) for r in range(group.size))
        self.attachment = AttachedRun(group, run, rows)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(seed + 1 + group.rank)
        reporter = EventReporter(rows[group.rank], run, Outbox(outbox), None)
        self.checkpoints = VerifiedCheckpoints(
            root_uri, self.attachment, self.model, self.optimizer, reporter=reporter, **arguments
        )
        # Forward only: running statistics follow each rank's own batch, weights stay equal.
        self.model(torch.randn(16, 4) * (1 + group.rank))

    def save(self, step: int) -> Any:
        weights, table = fingerprint_model(self.model)
        optimizer, _ = fingerprint_optimizer(self.optimizer, self.model)
        evidence = SaveEvidence(
            step=Step(step),
            weights_fingerprint=weights,
            tensor_fingerprints=table,
            optimizer_fingerprint=optimizer,
            checks={},
        )
        return self.checkpoints.save(evidence)

    def drawn(self) -> list[float]:
        return [float(torch.rand(())), float(dict(self.model.named_buffers())["1.running_var"].sum())]


def save_then_resume(root_uri: str, outbox: Path) -> dict[str, Any]:
    """The next random number and the running statistics before and after the resume, on this rank."""
    first = OneRank(root_uri, outbox, seed=1)
    ref = first.save(4)
    first.checkpoints.promote(Step(4))
    expected = first.drawn()
    again = OneRank(root_uri, outbox, seed=77)
    point = resume(again.attachment, again.checkpoints)
    return {"expected": expected, "found": again.drawn(), "same": point.checkpoint == ref, "start": point.start_step}


def fail_on_rank_1(root_uri: str, outbox: Path) -> dict[str, Any]:
    """Rank 1 cannot write its own file: a directory is in the way."""
    run = OneRank(root_uri, outbox, seed=1)
    if run.attachment.rank == 1:
        original = run.checkpoints.storage.write_stream

        def in_the_way(path: str, write: Any, **options: Any) -> Any:
            Path(root_uri.removeprefix("file://"), path, "in the way").mkdir(parents=True)
            return original(path, write, **options)

        run.checkpoints.storage.write_stream = in_the_way  # type: ignore[method-assign]
    return _raised(lambda: run.save(4))


def no_memory_for_a_copy(root_uri: str, outbox: Path) -> dict[str, Any]:
    """Saves in the background that begin nowhere (step 1) and on rank 0 only (3); the run goes on: nothing may hang."""
    run = OneRank(root_uri, outbox, seed=1, distributed=True, asynchronous=True)
    copy = background.save_in_background

    def fail(*_: Any) -> Any:
        raise MemoryError("no room for a copy")

    results = {}
    for step in range(1, 5):
        fails = step == 1 or (step == 3 and run.attachment.rank == 1)
        background.save_in_background = fail if fails else copy
        results[str(step)] = _raised(lambda step=step: run.save(step))  # type: ignore[misc]
    run.checkpoints.finish()
    return results


def corrupt_on_rank_1(root_uri: str, outbox: Path) -> dict[str, Any]:
    """Only rank 1's own file of the newer checkpoint is damaged: both must fall back."""
    run = OneRank(root_uri, outbox, seed=1)
    older = run.save(4)
    newer = run.save(9)
    run.checkpoints.promote(Step(9))
    if run.attachment.rank == 1:
        path = Path(newer.uri.removeprefix("file://")) / "rng-00001.pt"
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    run.attachment.cpu_group.barrier()
    again = OneRank(root_uri, outbox, seed=2)
    point = resume(again.attachment, again.checkpoints)
    return {"older": point.checkpoint == older, "skipped": list(point.skipped)}


def nothing_ordered_exists(root_uri: str, outbox: Path) -> dict[str, Any]:
    """Every rank raises although only rank 0 was given the directive."""
    run = OneRank(root_uri, outbox, seed=1)
    directive = ResumeDirective(
        incident_id="inc-1", checkpoint_uri=f"{root_uri}/step-00000001", manifest_sha256="0" * 64, max_step=Step(1)
    )
    given = directive if run.attachment.rank == 0 else None
    return _raised(lambda: resume(run.attachment, run.checkpoints, directive=given))


def _raised(act: Any) -> dict[str, Any]:
    try:
        act()
    except TruestepError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None}


def main() -> int:
    scenario, root_uri, store, outbox, rank, world_size = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(world_size))
    print(json.dumps(globals()[scenario](root_uri, Path(outbox))), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
