"""Training over torchdata's StatefulDataLoader, stopped in the middle of an epoch: what each rank of it does."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import truestep
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer

EPOCHS, BATCHES, BATCH = 2, 6, 4
STOPS = {("stream", 0): 8, ("stream", 2): 8, ("shuffled", 0): 6}
"""(data, worker processes) -> steps before the stop: two batches into the second epoch, or just between the two."""


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A stream of this rank and worker, which draws from a generator of its own and says where that stands."""

    def __init__(self, rank: int) -> None:
        self._rank, self._given, self._generator = rank, 0, torch.Generator()
        self._resumed = False

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        if not self._resumed:
            self._given = 0
            self._generator.manual_seed(10 * self._rank + (worker.id if worker else 0))
        self._resumed = False
        while self._given < BATCH * BATCHES // (worker.num_workers if worker else 1):
            self._given += 1
            yield torch.randn(8, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given, self._resumed = state["given"], True
        self._generator.set_state(state["generator"])


class Numbers(Dataset):  # type: ignore[type-arg]
    """Items that can be made again from their number."""

    def __len__(self) -> int:
        return dist.get_world_size() * BATCH * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Program:
    """One start of a training script."""

    def __init__(self, root_uri: str, data: str, workers: int) -> None:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sampler = StatefulDistributedSampler(Numbers()) if data == "shuffled" else None
        dataset = Stream(dist.get_rank()) if self.sampler is None else Numbers()
        self.loader = StatefulDataLoader(
            dataset,
            BATCH,
            sampler=self.sampler,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,  # Linux's default; not that of the tests' processes
        )
        self.epoch = 0
        self.position: Iterator[Tensor] | None = None
        self.losses: list[float] = []
        attachment = truestep.attach(self.model)
        checkpoints = truestep.VerifiedCheckpoints(
            root_uri, attachment, self.model, self.optimizer, extra_save=self.where, extra_load=self.go_to
        )
        self.start = truestep.resume(attachment, checkpoints).start_step
        self._rest = (attachment, checkpoints)

    def where(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def go_to(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.loader.load_state_dict(state["loader"])
        self.position = iter(self.loader)  # now: it draws a number, and the generators are put back after this

    def batches(self) -> Iterator[Tensor]:
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            if self.sampler is not None:
                self.sampler.set_epoch(epoch)
            position, self.position = self.position, None
            yield from self.loader if position is None else position

    def train(self, most: int | None = None) -> dict[str, Any]:
        attachment, checkpoints = self._rest
        alarm = truestep.train(
            self.model,
            attachment,
            self.optimizer,
            itertools.islice(self.batches(), most),
            lambda model, batch: model(batch).square().mean(),
            None,
            checkpoints,
            truestep.Schedule(audit_every=2, check_every=2),
            start_step=self.start,
            on_step=lambda _, loss: self.losses.append(float(loss)),
        )
        weights, state = fingerprint_model(self.model)[0], fingerprint_optimizer(self.optimizer, self.model)[0]
        return {"alarm": alarm is not None, "losses": self.losses, "weights": weights, "optimizer": state}


def stopped_in_an_epoch(_: int, root_uri: str) -> dict[str, Any]:
    """Whole and interrupted runs over every kind of loader."""
    # The ranks' processes are daemons, which may have no children; a loader's workers end with their loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # How long a loader waits for a forked worker that does not end by itself before it ends it: 5 s.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    results = {}
    for (data, workers), stop in STOPS.items():
        name = f"{data}-{workers}"
        whole = Program(f"{root_uri}/{name}-whole", data, workers).train()
        first = Program(f"{root_uri}/{name}", data, workers).train(stop)
        again = Program(f"{root_uri}/{name}", data, workers)
        results[name] = {"whole": whole, "first": first, "start": again.start, "again": again.train()}
    return results
