"""truestep in the `Trainer` of Lightning, under its DDP strategy.

    guard = TruestepCallback("s3://bucket/run", truestep.Schedule(audit_every=100, check_every=100))
    trainer = Trainer(strategy="ddp", callbacks=[guard], enable_checkpointing=False)
    alarm = guard.fit(trainer, module, loader)      # instead of trainer.fit(...): resumes, trains, guards, saves
    if alarm: truestep.report_sdc(alarm)

Checkpoints are truestep's: weights, optimizer, schedulers, random numbers and the loops' progress. A loader with
`state_dict` (such as torchdata's StatefulDataLoader) goes on by it; any other one with a length is read up to where it
stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from truestep import rng
from truestep.attachment import attach
from truestep.checkpoints import VerifiedCheckpoints
from truestep.contract import Alarm, TruestepError
from truestep.guard import CorruptionDetected, Guard
from truestep.metrics import WriteMetrics
from truestep.protocols import ResumePoint
from truestep.resumption import resume
from truestep.schedule import Schedule

try:
    from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("truestep.integrations.lightning needs lightning: pip install 'truestep[lightning]'") from error


class TruestepCallback(Callback):  # type: ignore[misc]
    """Guards one `fit`. One optimizer, automatic optimization, no 16-bit scaler."""

    def __init__(
        self,
        root_uri: str,
        schedule: Schedule,
        *,
        guard_options: Mapping[str, Any] | None = None,
        metrics: WriteMetrics | None = None,
        **checkpoint_options: Any,
    ) -> None:
        """guard_options: further ones of `Guard`. metrics: of `attach`. checkpoint_options: `VerifiedCheckpoints`'."""
        self._root_uri = root_uri
        self._schedule = schedule
        self._metrics = metrics
        self._guard_options = dict(guard_options or {})
        self._checkpoint_options = checkpoint_options
        self._restored: dict[str, Any] = {}
        self._to_skip = 0
        self._rng: rng.RngState | None = None
        self.start = ResumePoint(start_step=0)  # type: ignore[arg-type]
        """Where training starts, and why there; known once `fit` has begun."""

    def fit(self, trainer: Trainer, module: LightningModule, *arguments: Any, **keywords: Any) -> Alarm | None:
        """`Trainer.fit`, from where `start` says. The alarm that ended it, the same on every rank, or None."""
        if "ckpt_path" in keywords:
            raise TruestepError("ckpt_path is chosen by truestep: leave it out, or write a resume directive")
        if self not in trainer.callbacks:
            raise TruestepError("give this callback to the Trainer: Trainer(..., callbacks=[guard])")
        try:
            trainer.fit(module, *arguments, **keywords)
            self._checkpoints.finish()
        except CorruptionDetected as detected:
            return detected.alarm
        return None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """DDP and the optimizer exist, no data was read: attach, and load the state to start from. Collective."""
        model = trainer.strategy.model
        self._require_supported(trainer, pl_module, model)
        self._trainer, self._module, self._model = trainer, pl_module, model
        self._attachment = attach(model, metrics=self._metrics)
        (optimizer,) = trainer.optimizers
        self._checkpoints = VerifiedCheckpoints(
            self._root_uri,
            self._attachment,
            model,
            optimizer,
            extra_save=self._extra,
            extra_load=self._restored.update,
            **self._checkpoint_options,
        )
        self.start = resume(self._attachment, self._checkpoints)
        self._guard = Guard(
            model,
            optimizer,
            self._schedule,
            attachment=self._attachment,
            compute_loss=self._compute_loss,
            checkpoints=self._checkpoints,
            **self._guard_options,
        )
        if self.start.checkpoint is not None:
            self._restore(trainer)
        trainer.fit_loop.epoch_loop.automatic_optimization.run = self._run

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Give the loop back."""
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Read a loader that cannot be set up to where it stood."""
        loop = trainer.fit_loop
        if trainer.global_step != self.start.start_step:
            raise TruestepError(
                f"the Trainer starts at step {trainer.global_step}, the checkpoint at {self.start.start_step}; make a "
                "new Trainer and TruestepCallback for every fit"
            )
        skipped, self._to_skip = self._to_skip, 0
        for loader in loop._combined_loader.flattened if skipped else ():
            # Before the first batch is asked for: Lightning itself does it later, which is too late to read ahead.
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        for _ in range(skipped):
            next(loop._data_fetcher.iterator)
        if skipped and self._rng is not None:
            rng.restore(self._rng)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:  # noqa: ARG002
        """After the update and the schedulers'."""
        if not trainer.fit_loop._should_accumulate():
            self._guard.after_update()

    def _require_supported(self, trainer: Trainer, module: LightningModule, model: object) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TruestepError(
                f"the strategy trains {type(model).__name__}, not DistributedDataParallel: give "
                "Trainer(strategy='ddp') and more than one process"
            )
        if not module.automatic_optimization or len(trainer.optimizers) != 1:
            raise TruestepError("manual optimization or several optimizers: call truestep.Guard in your training_step")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise TruestepError("precision '16-mixed' scales the loss inside the step: give 'bf16-mixed' or '32-true'")

    def _restore(self, trainer: Trainer) -> None:
        for config, state in zip(trainer.lr_scheduler_configs, self._restored["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer.fit_loop.load_state_dict(self._restored["loop"])
        if not self._restored["loaders"]:
            # Saved inside the batch's end, which the loop has not counted as completed yet.
            self._to_skip = trainer.fit_loop.epoch_loop.batch_progress.current.ready % self._restored["batches"]
        self._rng = rng.capture()

    def _extra(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop
        state = loop.state_dict()
        loaders = bool(state.get("state_dict", {}).get("combined_loader"))
        batches = loop.max_batches
        if not loaders and batches == float("inf"):
            raise TruestepError(
                "the training loader has no length and no state_dict, so that a resumed run could not find its place: "
                "use torchdata's StatefulDataLoader, or give the loader state_dict and load_state_dict"
            )
        schedulers = [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs]
        return {"loop": state, "loaders": loaders, "batches": 0 if loaders else int(batches), "schedulers": schedulers}

    def _run(self, optimizer: Any, batch_idx: int, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """One batch of automatic optimization, as Lightning runs it, with the backward in front of the update.

        Lightning runs the backward inside ``optimizer.step(closure)``, where nothing can see a gradient before it is
        used. ``on_before_optimizer_step`` and clipping come once, where they belong.
        """
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        closure = automatic._make_closure(keywords, optimizer, batch_idx)
        index = batch_idx % self._trainer.accumulate_grad_batches
        window = self._window(batch_idx - index)
        accumulates = self._trainer.fit_loop._should_accumulate()
        batch, step = tuple(keywords.values()), self._trainer.global_step
        if index == 0:
            if self.start.checkpoint is not None and step == self.start.start_step:
                self._guard.warm_up(batch)
            self._guard.start_step(step, batch if window == 1 else None, micro_batches=window)
        loss = self._backward(closure, None if window == 1 else index, batch, accumulates=accumulates)
        if not accumulates:
            precision = self._trainer.precision_plugin
            precision._after_closure(self._module, self._trainer.strategy._lightning_optimizers[0])
            self._guard.before_update(loss if window == 1 else None)
            with _skipped(precision, "_after_closure"):
                automatic._optimizer_step(batch_idx, lambda: loss)
        result: dict[str, Any] = closure.consume_result().asdict()
        return result

    def _window(self, first: int) -> int:
        """Batches of the accumulation that begins with batch `first`: the last one of an epoch can be shorter.

        0 where nobody knows: a loader without a length ends where it ends, also in front of `limit_train_batches`.
        """
        count, loop = self._trainer.accumulate_grad_batches, self._trainer.fit_loop
        if count == 1:
            return 1
        return 0 if sized_len(loop._combined_loader) is None else int(min(count, loop.max_batches - first))

    def _backward(
        self, closure: Callable[[], Any], index: int | None, batch: Any, *, accumulates: bool
    ) -> torch.Tensor:
        """index: None where the batch is the only one of its step."""

        def act() -> torch.Tensor:
            if not accumulates:
                return closure()  # type: ignore[no-any-return]
            with self._model.no_sync():
                return closure()  # type: ignore[no-any-return]

        if index is None:
            return act()
        with self._guard.micro_batch(index, batch) as done:
            loss = act()
            done(loss)
        return loss

    def _compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """What `training_step` returns, as the backward gets it. What it logs is not logged a second time."""
        strategy, module = self._trainer.strategy, self._module
        with strategy.precision_plugin.train_step_context(), _skipped(module, "log"), _skipped(module, "log_dict"):
            output = strategy._forward_redirection(model, module, "training_step", *batch)
        loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
        share: torch.Tensor = loss / self._trainer.accumulate_grad_batches
        return share


@contextmanager
def _skipped(owner: Any, name: str) -> Iterator[None]:
    """A method that does nothing for a while."""
    object.__setattr__(owner, name, lambda *_args, **_keywords: None)
    try:
        yield
    finally:
        object.__delattr__(owner, name)
