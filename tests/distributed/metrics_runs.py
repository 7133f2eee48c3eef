"""A run whose ranks plot the checks each in its own way: all three libraries' interfaces, a failing one, and none."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from tests.distributed.scenarios import Run
from truestep.inject import Fault, arm
from truestep.metrics import Counters
from truestep.schedule import Schedule

FAULT = {"site": "gradient", "target": "", "model": "bit_flip", "bit": 20, "first_step": 9}


def plotted_run(rank: int, directory: str) -> dict[str, Any]:
    """Rank 0 plots, rank 1's writer raises, rank 2 gives none. From step 9 on rank 1's backward is wrong."""
    run = Run(rank)
    assert run.attachment is not None
    said = _Said()
    logging.getLogger("truestep.metrics").addHandler(said)
    plots = _Plots(directory) if rank == 0 else None
    run.attachment.counters = Counters({0: plots, 1: _fails}.get(rank))
    if rank == 1:
        arm(run.ddp, run.optimizer, Fault.from_json(FAULT | {"target": "blocks.0.mlp.0"}))
    alarm = run.train(16, Schedule(audit_every=4, check_every=4))
    return {
        "alarm": None if alarm is None else [alarm.step, list(alarm.suspect_ranks)],
        "steps": len(run.losses),
        "said": said.lines,
        "calls": plots.calls if plots else [],
        "tensorboard": plots.tensorboard() if plots else {},
        "opentelemetry": plots.opentelemetry() if plots else {},
    }


def _fails(values: dict[str, float], step: int) -> None:
    raise ConnectionError("the plotting service is away")


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Plots:
    """What a user writes, and what the libraries have kept of it."""

    def __init__(self, directory: str) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        with warnings.catch_warnings():
            # TensorBoard's own imports.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.utils.tensorboard import SummaryWriter
        self.calls: list[Any] = []
        self._directory = directory
        self._writer = SummaryWriter(directory)  # type: ignore[no-untyped-call]
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(metric_readers=[self._reader])
        self._meter = self._provider.get_meter("truestep")
        self._gauges: dict[str, Any] = {}

    def __call__(self, values: dict[str, float], step: int) -> None:
        self.calls.append([step, values])
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value)

    def tensorboard(self) -> dict[str, list[Any]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self._writer.close()  # type: ignore[no-untyped-call]
        events = EventAccumulator(self._directory)
        events.Reload()
        return {
            name: [[event.step, event.value] for event in events.Scalars(name)] for name in events.Tags()["scalars"]
        }

    def opentelemetry(self) -> dict[str, float]:
        data = self._reader.get_metrics_data()
        self._provider.shutdown()
        assert data is not None
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {metric.name: metric.data.data_points[0].value for scope in scopes for metric in scope.metrics}  # type: ignore[union-attr]
