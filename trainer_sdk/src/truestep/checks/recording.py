"""What the guard keeps of a step so that it can be replayed: inputs always, fingerprints of the results on audit
steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from truestep import rng
from truestep.checks.batches import KeptBatch
from truestep.checks.places import version_of
from truestep.fingerprint import (
    PendingFingerprints,
    agreeing_buffers,
    begin_fingerprints,
    fingerprint_tensor,
    named_buffers,
)
from truestep.replay import GradientRecorder, PassInputs, PassResult
from truestep.rng import RngState


def copy_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> copy of every buffer.

    All of them, on every step: a buffer's version does not tell, because the native batch norm updates its running
    statistics without raising it. But for those on meta, which have no content.
    """
    return {name: buffer.detach().clone() for name, buffer in named_buffers(module).items() if not buffer.is_meta}


class PassRecording:
    """One recorded micro-batch. Made before its forward; `finish` after its backward."""

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        *,
        audited: bool,
        loss_scale: float,
        one_of_several: bool = False,
        compared: bool = False,
    ) -> None:
        """batch: None where only `rebuild_batch` can give it. audited: fingerprint gradients, copy the batch.

        one_of_several: the step accumulates more micro-batches than this one.
        compared: the ranks' copies are compared in this step, so every buffer that the pass writes to must be known.
        """
        self.one_of_several = one_of_several
        self._compared = compared
        self._module = module
        self._loss_scale = loss_scale
        # A loss that writes into its batch must not change what is replayed.
        self._batch = KeptBatch(batch, copies_tensors=audited)
        self.has_batch = batch is not None
        self._rng: RngState = rng.capture()
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        self._before_forward: RemovableHandle | None = None
        self._buffers: dict[str, torch.Tensor] | None = {}
        if named_buffers(module):
            self._buffers = None
            # DDP copies rank 0's buffers to all before the forward; a hook of the inner module runs behind that.
            self._before_forward = module.register_forward_pre_hook(self._keep_buffers)
        self._recorder = GradientRecorder(dict(module.named_parameters())) if audited else None
        self._finished = False
        self.result: PassResult | None = None
        """Set by `finish` on audited steps."""
        self._counted_writes: frozenset[str] = frozenset()
        self._before_and_after: tuple[PendingFingerprints, PendingFingerprints] | None = None
        self.made_buffers: frozenset[str] = frozenset()
        """Set by `finish`: names of buffers that were not there before the pass."""

    def finish(self, loss: torch.Tensor | None) -> None:
        """Stop recording; a second call does nothing. loss: unscaled, of this micro-batch; None where it is not
        known."""
        if self._finished:
            return
        self._finished = True
        if self._before_forward is not None:
            self._before_forward.remove()
        self._note_buffers()
        if self._recorder is None:
            return
        gradients, _ = self._recorder.close()
        if loss is None:
            self.result = PassResult(gradients=gradients)
        else:
            loss = loss.detach()
            self.result = PassResult(
                loss=str(fingerprint_tensor(loss)), loss_value=repr(float(loss)), gradients=gradients
            )

    def abandon(self) -> None:
        """Stop recording a pass that nobody will judge; nothing is looked at."""
        if self._finished:
            return
        self._finished = True
        if self._before_forward is not None:
            self._before_forward.remove()
        if self._recorder is not None:
            self._recorder.stop()

    @cached_property
    def written_buffers(self) -> frozenset[str]:
        """After `finish`: names of buffers that the pass replaced or wrote to. Asked for after the step's own
        synchronisation: then an accelerator is not waited for."""
        if self._before_and_after is None:
            return self._counted_writes
        before, after = self._before_and_after
        return self._counted_writes | frozenset(after.table().changed_since(before.table()))

    def batch(self) -> Any:
        """The recorded batch as the pass got it. Raises `BatchChangedError` where that is not certain."""
        return self._batch.get()

    def inputs(self, batch: Any = None) -> PassInputs:
        """What the pass started from. batch: instead of the recorded one. Raises `BatchChangedError` like `batch`."""
        buffers = self._buffers if self._buffers is not None else copy_buffers(self._module)
        return PassInputs(
            batch=self.batch() if batch is None else batch,
            rng=self._rng,
            buffers=buffers,
            loss_scale=self._loss_scale,
        )

    def _note_buffers(self) -> None:
        before, now = self._versions, self._buffers_now()
        if self._buffers is None:
            # The module's forward was not called, so nothing is known of them.
            self._counted_writes = frozenset(now)
            return
        self.made_buffers = frozenset(now.keys() - before.keys())
        self._counted_writes = frozenset(
            name
            for name, (buffer, version) in now.items()
            if name in before and (before[name][0] is not buffer or before[name][1] != version)
        )
        if self._compared:
            self._begin_comparison(self._buffers)
        self._versions = {}

    def _begin_comparison(self, held: Mapping[str, torch.Tensor]) -> None:
        """Of the buffers whose version does not tell: batch norm's kernel, `.data` and custom operators write so."""
        left = agreeing_buffers(self._module).items()
        now = {name: buffer for name, buffer in left if name in held and name not in self._counted_writes}
        if now:
            self._before_and_after = begin_fingerprints({name: held[name] for name in now}), begin_fingerprints(now)

    def _keep_buffers(self, _module: nn.Module, _arguments: Any) -> None:
        if self._buffers is None:
            self._buffers = copy_buffers(self._module)
            self._versions = self._buffers_now()

    def _buffers_now(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Versions instead of contents: telling costs no synchronisation with an accelerator."""
        return {name: (buffer, version_of(buffer)) for name, buffer in named_buffers(self._module).items()}
