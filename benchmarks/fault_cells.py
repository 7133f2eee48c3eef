"""The grid of the fault campaign: which faults, where, how often, and in which numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

from truestep.inject import Fault

SITES: dict[str, dict[str, Any]] = {
    "activation": {"site": "module_output", "target": "blocks.0.mlp.0"},
    "query": {"site": "module_output", "target": "blocks.1.attention.query"},
    "key": {"site": "module_output", "target": "blocks.1.attention.key"},
    "value": {"site": "module_output", "target": "blocks.1.attention.value"},
    "activation gradient": {"site": "gradient", "target": "blocks.0.mlp.2"},
    "weight gradient": {"site": "parameter_gradient", "target": "blocks.1.mlp.0.weight"},
    "loss": {"site": "module_output", "target": "loss"},
    "replayer": {"site": "module_output", "target": "blocks.0.mlp.0", "phase": "replay"},
    "weight": {"site": "weight", "target": "blocks.0.mlp.2.weight"},
    "optimizer state": {"site": "optimizer_state", "target": "blocks.0.mlp.2.weight/exp_avg_sq"},
    "reduced gradient, one rank": {"site": "reduced_gradient", "target": "0"},
    "reduced gradient, all alike": {"site": "reduced_gradient", "target": "0"},
    "two ranks": {"site": "module_output", "target": "blocks.0.mlp.0"},
}
MEMORY = ("weight", "optimizer state")
REDUCED = ("reduced gradient, one rank", "reduced gradient, all alike")
NONFINITE = ("nan", "inf")
BITS = {"float32": (0, 10, 20, 23, 27, 30, 31), "bfloat16": (0, 3, 6, 7, 10, 14, 15)}
PROBABILITIES = (1.0, 0.1, 0.01)
STEPS = {1.0: 4, 0.1: 24, 0.01: 60}
"""Steps a cell lasts without an alarm."""
PERIOD = 2
"""Of audits, of the weight comparison and of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run with a fault."""

    site: str
    model: str
    probability: float
    dtype: str
    seed: int

    @property
    def key(self) -> str:
        """Names the cell in the results."""
        return f"{self.site} | {self.model} | {self.probability} | {self.dtype} | {self.seed}"

    @property
    def number(self) -> int:
        """Seeds everything random of the cell."""
        return random.Random(self.key).randrange(1 << 30)  # noqa: S311 - reproducible, not secret

    def faulty(self, ranks: int) -> tuple[int, ...]:
        """The ranks with a fault."""
        chooser = random.Random(self.number)  # noqa: S311
        if self.site == "reduced gradient, all alike":
            return tuple(range(ranks))
        return tuple(sorted(chooser.sample(range(ranks), 2 if self.site == "two ranks" else 1)))

    def fault(self, rank: int) -> Fault:
        """The fault of a rank; on every rank the same one where the sum is wrong for all alike."""
        alike = self.site == "reduced gradient, all alike"
        chooser = random.Random(self.number + (0 if alike else 1 + rank))  # noqa: S311
        first = chooser.randrange(2)
        # A bit that is flipped in memory again and again would flip back.
        once = self.site in MEMORY and self.probability == 1.0
        return Fault.from_json(
            {
                **SITES[self.site],
                **_shape(self.model, self.dtype),
                "element": chooser.randrange(1 << 16),
                "first_step": first,
                "last_step": first if once else None,
                "probability": self.probability,
                "seed": chooser.randrange(1 << 30),
            }
        )


def _shape(model: str, dtype: str) -> dict[str, Any]:
    kind, _, number = model.partition(" ")
    if kind == "bit":
        return {"model": "bit_flip", "bit": int(number)}
    if kind == "run":
        return {"model": "bit_flip", "bit": 20 if dtype == "float32" else 5, "elements": int(number)}
    if kind == "stuck":
        return {"model": "stuck", "bit": 22 if dtype == "float32" else 6}
    return {"model": kind}


def grid(seeds: int) -> list[Cell]:
    """Every cell, in an order that makes any beginning of it a fair sample."""
    cells = []
    for site, dtype, probability in product(SITES, BITS, PROBABILITIES):
        models = [f"bit {bit}" for bit in BITS[dtype]]
        models += ["null", "run 2", "run 4", "run 8", "run 16", "relative", "stuck", "nan", "inf"]
        if site == "two ranks":
            models = [model for model in models if model not in NONFINITE]
        for model, seed in product(models, range(seeds if probability == 1.0 else 1)):
            cells.append(Cell(site=site, model=model, probability=probability, dtype=dtype, seed=seed))
    random.Random(0).shuffle(cells)  # noqa: S311
    return sorted(cells, key=lambda cell: cell.seed)
