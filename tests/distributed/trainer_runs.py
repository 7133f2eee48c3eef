"""The examples' trainings, three in one process group: clean, with a bad GPU, and resumed."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any

from truestep.contract import Alarm

STEPS, FAULT_STEP = 12, 8


def three_trainings(rank: int, world_size: int, example: str, root: str, accumulate: int) -> dict[str, Any]:
    """What each training of an example returned. The environment is torchrun's on one machine."""
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train = importlib.import_module(f"examples.{example}.train")
    clean = train.run(f"{root}/clean", steps=STEPS, accumulate=accumulate)
    faulty = train.run(f"{root}/run", steps=STEPS, accumulate=accumulate, fault_step=FAULT_STEP)
    resumed = train.run(f"{root}/run", steps=STEPS, accumulate=accumulate)
    return {name: _plain(outcome) for name, outcome in (("clean", clean), ("faulty", faulty), ("resumed", resumed))}


def _plain(outcome: dict[str, Any]) -> dict[str, Any]:
    alarm: Alarm | None = outcome["alarm"]
    return {**outcome, "alarm": None if alarm is None else [alarm.step, *alarm.suspect_ranks]}
