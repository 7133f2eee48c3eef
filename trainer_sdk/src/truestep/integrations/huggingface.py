"""truestep in the `Trainer` of Hugging Face transformers, under DDP (torchrun).

    trainer = Trainer(model, args, train_dataset=...)
    guard = TruestepCallback(trainer, "s3://bucket/run", truestep.Schedule(audit_every=100, check_every=100))
    alarm = guard.train()                 # instead of trainer.train(): resumes, trains, guards, saves
    if alarm: truestep.report_sdc(alarm)

Checkpoints are truestep's: weights, optimizer, scheduler, random numbers and the trainer's own state, so that the data
goes on where it stood. `save_strategy="no"` leaves the Trainer's own, which nothing proves, out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from truestep.attachment import attach
from truestep.checkpoints import VerifiedCheckpoints
from truestep.contract import Alarm, TruestepError
from truestep.guard import CorruptionDetected, Guard
from truestep.metrics import WriteMetrics
from truestep.resumption import resume
from truestep.schedule import Schedule

try:
    import transformers
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError(
        "truestep.integrations.huggingface needs transformers: pip install 'truestep[huggingface]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator

_STATE = "trainer_state.json"


class TruestepCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Guards one `Trainer`. Every rank makes it, before anything else trains with this trainer."""

    def __init__(
        self,
        trainer: transformers.Trainer,
        root_uri: str,
        schedule: Schedule,
        *,
        guard_options: Mapping[str, Any] | None = None,
        metrics: WriteMetrics | None = None,
        **checkpoint_options: Any,
    ) -> None:
        """Wraps the trainer's model in DDP, attaches, loads the checkpoint to start from. Collective.

        guard_options: further arguments of `Guard`. metrics: of `attach`. checkpoint_options: of `VerifiedCheckpoints`.
        Raises `TruestepError` where the trainer does not run DDP, and as `resume` does.
        """
        self._trainer = trainer
        model = trainer.accelerator.prepare_model(trainer._wrap_model(trainer.model))
        if not isinstance(model, DistributedDataParallel):
            raise TruestepError(
                f"the Trainer runs {type(model).__name__}, not DistributedDataParallel: start one process a GPU with "
                "torchrun, without fsdp or deepspeed in the TrainingArguments"
            )
        trainer.model_wrapped = model
        self._attachment = attach(model, metrics=metrics)
        optimizer = trainer.create_optimizer()
        self._restored: dict[str, Any] = {}
        self._checkpoints = VerifiedCheckpoints(
            root_uri,
            self._attachment,
            model,
            optimizer,
            extra_save=self._extra,
            extra_load=self._restored.update,
            **checkpoint_options,
        )
        self.start = resume(self._attachment, self._checkpoints)
        """Where training starts, and why there."""
        self._rng = _captured_generators()
        self._settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._guard = Guard(
            model,
            optimizer,
            schedule,
            attachment=self._attachment,
            compute_loss=self._compute_loss,
            checkpoints=self._checkpoints,
            **(guard_options or {}),
        )
        self._training_step: Callable[..., torch.Tensor] = trainer.training_step
        self._micro_batch = 0
        self._loss: torch.Tensor | None = None
        trainer.add_callback(self)

    @property
    def checkpoints(self) -> VerifiedCheckpoints:
        """Where they lie."""
        return self._checkpoints

    def train(self, **arguments: Any) -> Alarm | None:
        """`Trainer.train`, from where `start` says. The alarm that ended it, the same on every rank, or None."""
        if "resume_from_checkpoint" in arguments:
            raise TruestepError(
                "resume_from_checkpoint is chosen by truestep: leave it out, or write a resume directive"
            )
        with tempfile.TemporaryDirectory() as directory, self._in_charge():
            if self.start.checkpoint is not None:
                Path(directory, _STATE).write_text(self._restored["trainer_state"])
                arguments["resume_from_checkpoint"] = directory
            try:
                self._trainer.train(**arguments)
                self._checkpoints.finish()
            except CorruptionDetected as detected:
                return detected.alarm
        return None

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        """The trainer reads its position alone; what it would load beside that is loaded, and proved, already."""
        replaced = {
            "training_step": self._guarded_step,
            "_load_from_checkpoint": lambda *_args, **_kwargs: None,
            "_load_optimizer_and_scheduler": self._load_scheduler,
            "_load_rng_state": lambda *_args: self._rng(),
        }
        vars(self._trainer).update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                delattr(self._trainer, name)

    def _guarded_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        trainer, batch = self._trainer, (dict(inputs), num_items_in_batch)
        count = trainer.current_gradient_accumulation_steps
        step = trainer.state.global_step
        if self._micro_batch == 0:
            if self.start.checkpoint is not None and step == self.start.start_step:
                self._guard.warm_up(batch)
            self._guard.start_step(step, batch if count == 1 else None, micro_batches=count)
        if count == 1:
            loss, backward = self._forward(model, batch)
            backward()
            self._loss = loss
            return loss.detach()
        with self._guard.micro_batch(self._micro_batch, batch) as done:
            loss, backward = self._forward(model, batch)
            backward()
            done(loss)
        self._micro_batch = (self._micro_batch + 1) % count
        self._loss = None
        return loss.detach()

    def _compute_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._forward(model, batch)[0]

    def _forward(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Callable[[], None]]:
        """The loss as the trainer's own step computes it, subclass or not, and the backward that it would run."""
        accelerator, caught = self._trainer.accelerator, list[tuple[torch.Tensor, dict[str, Any]]]()
        original = accelerator.backward
        accelerator.backward = lambda loss, **keywords: caught.append((loss, keywords))
        try:
            self._training_step(model, dict(batch[0]), batch[1])
        finally:
            del accelerator.backward
        ((loss, keywords),) = caught
        return loss, lambda: original(loss, **keywords)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The trainer must be where the checkpoint says, or the data would not fit the weights."""
        if state.global_step != self.start.start_step:
            raise TruestepError(
                f"the Trainer starts at step {state.global_step}, the checkpoint at {self.start.start_step}; make a "
                "new TruestepCallback for every call of train"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Between clipping and the update."""
        self._guard.before_update(self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """After the update and the scheduler's."""
        self._guard.after_update()

    def _load_scheduler(self, *_arguments: Any) -> None:
        # A scheduler that is made sets the first step's learning rate, over the one that was loaded.
        for group, settings in zip(self._trainer.optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        self._trainer.lr_scheduler.load_state_dict(self._restored["scheduler"])
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and "scaler" in self._restored:
            scaler.load_state_dict(self._restored["scaler"])

    def _extra(self) -> dict[str, Any]:
        trainer = self._trainer
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, _STATE)
            trainer.state.save_to_json(str(path))
            extra = {"trainer_state": path.read_text(), "scheduler": trainer.lr_scheduler.state_dict()}
        scaler = trainer.accelerator.scaler
        return extra if scaler is None else {**extra, "scaler": scaler.state_dict()}


def _captured_generators() -> Callable[[], None]:
    """Puts back the generators as they are now: making the data loaders draws from them."""
    from truestep import rng

    state = rng.capture()
    return lambda: rng.restore(state)
