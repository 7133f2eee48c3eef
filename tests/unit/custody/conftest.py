"""Real runs of one process: a Gloo group of one, a small model, checkpoints in a directory or in an S3 server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moto.server import ThreadedMotoServer
from torch import nn

from benchmarks.checkpoint_run import AttachedRun
from truestep.checkpoints import VerifiedCheckpoints
from truestep.collectives import CpuGroup
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.protocols import SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter

GPU_UUID = "GPU-00000000-0000-0000-0000-000000000001"


@dataclass
class Run:
    """One start of a training job: model, optimizer, checkpoints, and the outbox it reports into."""

    attachment: AttachedRun
    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpoints: VerifiedCheckpoints
    outbox: Outbox
    losses: list[float] = field(default_factory=list)

    def train(self, steps: int) -> None:
        """Updates on random batches: the same random numbers give the same weights."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))

    def evidence(self, step: int) -> SaveEvidence:
        combined, table = fingerprint_model(self.model)
        return SaveEvidence(
            step=Step(step),
            weights_fingerprint=combined,
            tensor_fingerprints=table,
            optimizer_fingerprint=fingerprint_optimizer(self.optimizer, self.model)[0],
            checks={"weights": step},
        )

    def save(self, step: int) -> Any:
        return self.checkpoints.save(self.evidence(step))

    def fingerprint(self) -> str:
        return fingerprint_model(self.model)[0]

    def events(self) -> list[Any]:
        return self.outbox.pending()


@pytest.fixture(scope="module", autouse=True)
def process_group(world_of_one: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(1)  # idle OpenMP threads spin, and slow down the processes that tests start
    with world_of_one(tmp_path_factory.mktemp("store")):
        world = dist.group.WORLD
        assert world is not None
        yield world


@pytest.fixture(scope="module")
def cpu_group(process_group: dist.ProcessGroup) -> CpuGroup:
    return CpuGroup(process_group)


@pytest.fixture(scope="session")
def aws() -> Iterator[str]:
    """URL of an in-process server that speaks S3 and EventBridge; boto3 finds it through the environment."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "eu-central-1",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield url
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    server.stop()


@pytest.fixture(params=["file", "s3"])
def root_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "checkpoints").as_uri()
    request.getfixturevalue("aws")
    import boto3

    bucket = f"checkpoints-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    return f"s3://{bucket}/runs/gpt"


@pytest.fixture
def file_root(tmp_path: Path) -> str:
    return (tmp_path / "checkpoints").as_uri()


@pytest.fixture
def start(cpu_group: CpuGroup, tmp_path: Path) -> Any:
    """Starts a run below a root: ``start(root_uri, seed=0, **arguments of VerifiedCheckpoints)``."""

    def make(root_uri: str, *, seed: int = 0, world_size: int = 1, **arguments: Any) -> Run:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attempt_id = uuid.uuid4().hex
        run = RunRef(run_id="run", attempt_id=attempt_id, world_size=world_size, checkpoint_root=root_uri)
        row = IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("node-a"), gpu_uuid=GPU_UUID)
        outbox = Outbox(tmp_path / f"outbox-{attempt_id}")
        attachment = AttachedRun(cpu_group, run, (row,))
        reporter = EventReporter(row, run, outbox, None)
        checkpoints = VerifiedCheckpoints(root_uri, attachment, model, optimizer, reporter=reporter, **arguments)
        return Run(attachment, model, optimizer, checkpoints, outbox)

    return make
