"""What is kept of a batch is what the pass started from, or it is said that this is not certain."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from truestep.checks.batches import BatchChangedError, KeptBatch, unfit_for_rebuilding
from truestep.checks.recording import PassRecording
from truestep.replay import PassInputs


@dataclass
class Sample:
    tokens: Tensor
    names: list[str]


def batch() -> dict[str, Any]:
    return {"x": torch.ones(2, 3), "labels": [torch.zeros(3)], "host": np.zeros(4), "s": Sample(torch.ones(2), ["a"])}


def pop(kept: dict[str, Any]) -> None:
    kept.pop("x")


def append(kept: dict[str, Any]) -> None:
    kept["s"].names.append("b")


def host(kept: dict[str, Any]) -> None:
    kept["host"][1] = 5


def fill(kept: dict[str, Any]) -> None:
    kept["labels"][0].fill_(7)


def through_a_view(kept: dict[str, Any]) -> None:
    kept["s"].tokens[0] = 7


@pytest.mark.parametrize("copies_tensors", [True, False])
@pytest.mark.parametrize("change", [pop, append, host])
def test_changes_of_containers_and_host_arrays_do_not_reach_the_kept_batch(
    change: Any, *, copies_tensors: bool
) -> None:
    given = batch()
    kept = KeptBatch(given, copies_tensors=copies_tensors)
    change(given)
    found = kept.get()
    assert sorted(found) == ["host", "labels", "s", "x"]
    assert found["s"].names == ["a"]
    assert not found["host"].any()


@pytest.mark.parametrize("change", [fill, through_a_view])
def test_a_written_tensor_is_kept_where_it_was_copied_and_noticed_where_it_was_not(change: Any) -> None:
    given = batch()
    copied, referred = KeptBatch(given, copies_tensors=True), KeptBatch(given, copies_tensors=False)
    assert referred.get()["labels"][0] is given["labels"][0], "no copy of a tensor"
    change(given)
    assert torch.equal(copied.get()["labels"][0], torch.zeros(3))
    assert torch.equal(copied.get()["s"].tokens, torch.ones(2))
    with pytest.raises(BatchChangedError, match="rebuild_batch"):
        referred.get()


def test_what_cannot_be_copied_or_does_not_count_its_writes_is_not_certain() -> None:
    with torch.inference_mode():
        uncounted = torch.ones(3)
    for given in ({"lock": threading.Lock()}, [uncounted]):
        with pytest.raises(BatchChangedError):
            KeptBatch(given, copies_tensors=False).get()


def test_tensors_with_a_history_are_kept_without_it() -> None:
    """The output of a frozen encoder that nobody wrapped in no_grad."""
    encoded = nn.Linear(4, 4)(torch.ones(2, 4))
    given = {"x": encoded, "again": encoded}
    recording = PassRecording(nn.Linear(4, 1), given, audited=True, loss_scale=1.0)
    recording.finish(None)
    found = recording.batch()
    assert found["x"] is found["again"]
    assert found["x"].is_leaf
    assert found["x"].requires_grad
    assert torch.equal(found["x"], encoded)
    shipped = PassInputs.from_bytes(recording.inputs().to_bytes())
    assert shipped.fingerprint() == recording.inputs().fingerprint()


def test_a_rebuild_batch_of_another_signature_is_told_what_train_takes_instead() -> None:
    told = unfit_for_rebuilding(lambda step: step)  # type: ignore[misc, arg-type, return-value]
    assert "called as rebuild_batch(step, rank)" in told
    assert told.endswith("or pass None"), "an argument of train by position: left out, it is a TypeError"
    assert unfit_for_rebuilding(lambda step, rank: (step, rank)) == ""
