"""A small classifier with Lightning, guarded by truestep: a GPU goes bad, and training comes back.

    torchrun --nproc-per-node 3 examples/lightning/train.py --root file:///tmp/lightning-run [--fault-step 8]

Run by `python -m examples.story lightning`, which runs it three times: clean, with a fault, and resumed.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

import truestep
from examples.command_line import arguments_of, conclude
from truestep.fingerprint import fingerprint_model
from truestep.inject import Fault, arm
from truestep.integrations.lightning import TruestepCallback

FAULTY_RANK = 1
FEATURES, CLASSES = 16, 5


class Classifier(LightningModule):
    """Dropout, clipping and a schedule: all of it must come back exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, CLASSES))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Cross-entropy."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """A new learning rate every step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class BadGpu(Callback):
    """Makes this rank compute wrongly from a step on."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Once the model is wrapped."""
        fault = Fault(site="module_output", target="layers.0", elements=16, bit=20, first_step=self.first_step)
        arm(trainer.strategy.model, trainer.optimizers[0], fault)


def run(root: str, *, steps: int, accumulate: int = 1, fault_step: int | None = None) -> dict[str, Any]:
    """Train from the newest trusted checkpoint on; what came out, the same on every rank but for the alarm's copies."""
    seed_everything(7, verbose=False)
    module = Classifier()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(120, FEATURES, generator=generator), torch.randint(0, CLASSES, (120,), generator=generator)
    )
    guard = TruestepCallback(root, truestep.Schedule(audit_every=6, check_every=2))
    faulty = fault_step is not None and int(os.environ["RANK"]) == FAULTY_RANK
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            strategy="ddp",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            max_steps=steps,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=1.0,
            callbacks=[guard, BadGpu(fault_step)] if faulty and fault_step is not None else [guard],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=directory,
        )
        alarm = guard.fit(trainer, module, DataLoader(data, batch_size=4, shuffle=True))
    return {"start_step": guard.start.start_step, "alarm": alarm, "weights": fingerprint_model(module)[0]}


def main() -> None:
    """Train; the first rank writes what came out, or every rank holds after an alarm."""
    options = arguments_of(__doc__ or "")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outcome = run(options.root, steps=options.steps, accumulate=options.accumulate, fault_step=options.fault_step)
    conclude(outcome, options.result)


if __name__ == "__main__":
    main()
