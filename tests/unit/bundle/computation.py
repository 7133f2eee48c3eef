"""A small computation, and a bundle of it as a witness would write one. `build` is what a user's factory looks like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from truestep import rng
from truestep.attachment import Attachment
from truestep.bundle.failing import ChosenPass, FailingPass
from truestep.bundle.modes import applied_modes, read_modes
from truestep.bundle.settings import BundleSettings
from truestep.bundle.writing import EvidenceBundles, Occasion
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step, Verdict, VerdictKind
from truestep.replay import PassInputs, PassResult, replay

STEP = Step(9)
ALARM = "a" * 32
FACTORY = "tests.unit.bundle.computation:build"


class Network(nn.Module):
    """Dropout draws random numbers, batch norm has buffers, and the last layer is reached through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(rows)).relu())
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def squared(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    rows, targets = batch
    result: Tensor = (model(rows) - targets).square().mean()
    return result


def weighed_by_place(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Weighs by rank and world size, where there are any."""
    weight = 1.0 + dist.get_rank() / dist.get_world_size() if dist.is_initialized() else 1.0
    return squared(model, batch) * weight


def build() -> tuple[nn.Module, Any]:
    """The factory."""
    return Network(), squared


def build_nothing() -> int:
    """A factory that gives no model."""
    return 3


class _OneRank:
    """The collectives of a group of one."""

    rank, size = 0, 1

    def exchange(self, transfers: Any, payload: bytes) -> dict[int, bytes]:
        return {}

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        return data


class _Alone:
    """An attachment of one rank."""

    rank = Rank(0)
    world_size = 1
    cpu_group = _OneRank()
    identity = IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("node-0"))
    identities = (identity,)
    run = RunRef(run_id="run", attempt_id="attempt", world_size=1)


class Witness:
    """Trained model, recorded pass; writes bundles."""

    def __init__(self, compute_loss: Any = None) -> None:
        """compute_loss: default, `squared`."""
        torch.manual_seed(3)
        self.compute_loss = compute_loss or squared
        self.model = Network()
        self.batch = (torch.randn(5, 6), torch.randn(5, 4))
        self.inputs = PassInputs(
            batch=self.batch, rng=rng.capture(), buffers={n: b.clone() for n, b in self.model.named_buffers()}
        )
        # One thread: more of them would only wait for one another here.
        self.modes = {**read_modes(), "num_threads": 1}
        with applied_modes(self.modes):
            self.result = replay(self.model, self.inputs, self.compute_loss)

    def failing(self, **changes: Any) -> FailingPass:
        """The failing pass, recorded right by this rank."""
        chosen = ChosenPass(producer=Rank(0), replayer=Rank(0), parties=(Rank(0),), reference=Rank(0), writer=Rank(0))
        failing = FailingPass(
            chosen=chosen,
            compares_loss=True,
            compares_gradients=True,
            modes=self.modes,
            own=self.result,
            payload=self.inputs.to_bytes(),
        )
        return replace(failing, **changes)

    def write(
        self, root: Path | str, *, failing: FailingPass | None = None, store: Any = None, **settings: Any
    ) -> dict[str, str]:
        """What the evidence says of the bundle."""
        uri = root if isinstance(root, str) else root.as_uri()
        bundles = EvidenceBundles(
            cast(Attachment, _Alone()),
            self.model,
            self.compute_loss,
            BundleSettings(**{"root_uri": uri, "model": FACTORY, **settings}),
            lambda: store,
        )
        verdict = Verdict(kind=VerdictKind.CONCLUSIVE, reason="r", suspects=(Rank(0),))
        return bundles.write(Occasion(alarm_id=ALARM, step=STEP, verdict=verdict, failing=failing or self.failing()))


def wrong(result: PassResult) -> PassResult:
    """Another result."""
    return replace(result, loss="v1:" + "0" * 48)
