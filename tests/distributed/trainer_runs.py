"""The examples' trainings, three in one process group: clean, with a bad GPU, and resumed."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from truestep.contract import Alarm

STEPS, FAULT_STEP = 12, 8


def three_trainings(rank: int, world_size: int, example: str, root: str, accumulate: int) -> dict[str, Any]:
    """What each training of an example returned."""
    _pretend_torchrun(rank, world_size)
    train = importlib.import_module(f"examples.{example}.train")
    clean = train.run(f"{root}/clean", steps=STEPS, accumulate=accumulate)
    faulty = train.run(f"{root}/run", steps=STEPS, accumulate=accumulate, fault_step=FAULT_STEP)
    resumed = train.run(f"{root}/run", steps=STEPS, accumulate=accumulate)
    return {name: _plain(outcome) for name, outcome in (("clean", clean), ("faulty", faulty), ("resumed", resumed))}


def _pretend_torchrun(rank: int, world_size: int) -> None:
    """The environment that torchrun gives on one machine."""
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _plain(outcome: dict[str, Any]) -> dict[str, Any]:
    alarm: Alarm | None = outcome["alarm"]
    return {**outcome, "alarm": None if alarm is None else [alarm.step, *alarm.suspect_ranks]}


def short_windows(rank: int, world_size: int, root: str) -> dict[str, int]:
    """Updates of two epochs of Lightning, where the last accumulation of an epoch is shorter than the others."""
    _pretend_torchrun(rank, world_size)
    from lightning.pytorch import LightningModule, Trainer

    from truestep.integrations.lightning import TruestepCallback
    from truestep.schedule import Schedule

    class Small(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.ones(3 * 4, 8)

    three = torch.ones(world_size * 4 * 3, 8)
    cases: dict[str, Any] = {"length": three, "no length": Stream()}
    updates = {}
    for name, data in cases.items():
        callback = TruestepCallback(root, Schedule(audit_every=2, check_every=100))
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy="ddp",
            callbacks=[callback],
            enable_checkpointing=False,
            max_epochs=2,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        alarm = callback.fit(trainer, Small(), torch.utils.data.DataLoader(data, batch_size=4))
        updates[name] = -1 if alarm else int(trainer.global_step)
    return updates
