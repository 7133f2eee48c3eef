"""What the guard keeps of a step so that it can be replayed: inputs always, fingerprints of the results on audit
steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from truestep import rng
from truestep.fingerprint import fingerprint_tensor
from truestep.replay import GradientRecorder, PassInputs, PassResult
from truestep.rng import RngState


class BufferSnapshots:
    """Copies of a module's buffers before a forward; a buffer that nobody wrote to since is not copied again."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def take(self, *, fresh: bool) -> dict[str, torch.Tensor]:
        """Name -> copy. fresh: copy all, so that a bit that flipped in memory shows (it does not raise a version)."""
        result = {}
        for name, buffer in self._module.named_buffers():
            kept = self._kept.get(name)
            if fresh or kept is None or kept[0] is not buffer or kept[1] != buffer._version:
                kept = (buffer, buffer._version, buffer.detach().clone())
                self._kept[name] = kept
            result[name] = kept[2]
        return result


class PassRecording:
    """One recorded micro-batch. Made before its forward; `finish` after its backward."""

    def __init__(
        self, module: nn.Module, snapshots: BufferSnapshots, batch: Any, *, audited: bool, loss_scale: float
    ) -> None:
        """batch: None where only `rebuild_batch` can give it. audited: fingerprint gradients, copy everything."""
        self._snapshots = snapshots
        self._audited = audited
        self._loss_scale = loss_scale
        # A loss that writes into its batch must not change what is replayed; off audit steps the reference has to do.
        self._batch = copy.deepcopy(batch) if audited else batch
        self.has_batch = batch is not None
        self._rng: RngState = rng.capture()
        self._buffers: dict[str, torch.Tensor] | None = None
        # DDP copies rank 0's buffers to all before the forward; a hook of the inner module runs behind that.
        self._before_forward = module.register_forward_pre_hook(self._keep_buffers)
        self._recorder = GradientRecorder(dict(module.named_parameters())) if audited else None
        self._finished = False
        self.result: PassResult | None = None
        """Set by `finish` on audited steps."""

    def finish(self, loss: torch.Tensor | None) -> None:
        """Stop recording; a second call does nothing. loss: unscaled, of this micro-batch; None where it is not
        known."""
        if self._finished:
            return
        self._finished = True
        self._before_forward.remove()
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

    def inputs(self, batch: Any = None) -> PassInputs:
        """What the pass started from. batch: instead of the recorded one, which may be missing."""
        buffers = self._buffers if self._buffers is not None else self._snapshots.take(fresh=True)
        return PassInputs(
            batch=self._batch if self.has_batch else batch,
            rng=self._rng,
            buffers=buffers,
            loss_scale=self._loss_scale,
        )

    def _keep_buffers(self, _module: nn.Module, _arguments: Any) -> None:
        if self._buffers is None:
            self._buffers = self._snapshots.take(fresh=self._audited)
