"""What attach and the guard refuse, and what they say at the start. One process, one rank."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import truestep
from truestep import group_lifetime
from truestep.checks import buckets
from truestep.checks.buckets import fetch, look_at_reduced, nonfinite_flag
from truestep.checks.ring_replay import AuditSetupError
from truestep.fingerprint.native import NativeKernel
from truestep.protocols import SaveEvidence

MakeModel = Callable[[], DistributedDataParallel]


@pytest.fixture
def make_model(world_of_one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModel]:
    monkeypatch.setenv("TRUESTEP_OUTBOX_DIR", str(tmp_path / "outbox"))
    monkeypatch.setenv("TRUESTEP_DIRECTIVE", str(tmp_path / "none.json"))
    monkeypatch.setenv("TRUESTEP_RUN_ID", "run-7")
    with world_of_one(tmp_path):
        yield lambda: DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).square().sum()
    return value


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_attachment_says_who_and_which_run_and_warns_once_about_few_nodes(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "truestep"):
        first = truestep.attach(make_model())
    assert (first.rank, first.world_size, first.run.run_id, len(first.identities)) == (0, 1, "run-7", 1)
    assert first.identity.attempt_id == first.run.attempt_id
    assert first.resumed is None
    assert len([record for record in caplog.records if "3 nodes" in record.getMessage()]) == 1
    assert truestep.attach(make_model()).run.attempt_id != first.run.attempt_id


def test_a_model_outside_ddp_and_one_with_a_hook_are_refused_with_advice(make_model: MakeModel) -> None:
    with pytest.raises(TypeError, match="got Linear; wrap it first"):
        truestep.attach(nn.Linear(2, 2))  # type: ignore[arg-type]
    model = make_model()
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=r"attach\(ddp_model, comm_hook=\(state, hook\)\)"):
        truestep.attach(model)
    attached = make_model()
    truestep.attach(attached)
    with pytest.raises(ValueError, match="attach once"):
        truestep.attach(attached)


def test_the_guard_refuses_what_cannot_be_audited_before_the_first_step(make_model: MakeModel) -> None:
    schedule = truestep.Schedule(audit_every=5)
    bare = make_model()
    with pytest.raises(ValueError, match=r"call truestep\.attach"):
        truestep.Guard(bare, optimizer_of(bare), schedule, compute_loss=loss_of)
    truestep.attach(bare)
    with pytest.raises(AuditSetupError, match="compute_loss"):
        truestep.Guard(bare, optimizer_of(bare), schedule)
    synchronised = make_model()
    synchronised.module.append(nn.SyncBatchNorm(4))  # DDP itself takes it on accelerators only
    truestep.attach(synchronised)
    with pytest.raises(AuditSetupError, match=r"SyncBatchNorm \(1\)"):
        truestep.Guard(synchronised, optimizer_of(synchronised), schedule, compute_loss=loss_of)


def test_calls_in_the_wrong_order_are_said_and_not_guessed_at(make_model: MakeModel) -> None:
    model = make_model()
    truestep.attach(model)
    guard = truestep.Guard(model, optimizer_of(model), truestep.Schedule(audit_every=1), compute_loss=loss_of)
    with pytest.raises(ValueError, match="call start_step"):
        guard.before_update()
    guard.start_step(0)
    loss_of(model, torch.ones(1, 4)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(AuditSetupError, match=r"pass it to start_step\(step, batch\)"):
        guard.before_update()


def test_the_bucket_layout_has_a_hash_after_the_first_backward(make_model: MakeModel) -> None:
    model = make_model()
    attachment = truestep.attach(model)
    assert attachment.sensor.layout_sha256 == ""
    loss_of(model, torch.ones(1, 4)).backward()  # type: ignore[no-untyped-call]
    seen = attachment.sensor.take()
    assert len(attachment.sensor.layout_sha256) == 64
    assert set(attachment.sensor.bucket_parameters(0)) == {"0.weight", "0.bias"}
    assert (seen.local_nonfinite, seen.reduced_nonfinite) == ((), ())
    assert seen.reduced_word != 0


@pytest.fixture(scope="module", params=["torch operations", "compiled"])
def kernel(request: pytest.FixtureRequest) -> NativeKernel:
    found = NativeKernel()
    if request.param == "compiled" and not found.build():
        pytest.skip(found.reason)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_nonfinite_element_anywhere_is_flagged(
    dtype: torch.dtype, bad: float, kernel: NativeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "KERNEL", kernel)
    tensor = torch.randn(1001).to(dtype)
    assert not nonfinite_flag(tensor)
    assert not look_at_reduced(tensor)[0]
    for index in (0, 500, 1000):
        changed = tensor.clone()
        changed[index] = bad
        assert nonfinite_flag(changed)
        assert look_at_reduced(changed)[0]
    assert not nonfinite_flag(torch.empty(0, dtype=dtype))


def sums_of(bucket: torch.Tensor) -> list[int]:
    return fetch([], [look_at_reduced(bucket)[1]])[1]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65])
def test_one_flipped_bit_anywhere_changes_the_sums_of_a_bucket(size: int) -> None:
    bucket = torch.randn(size + 1)[1:]
    before = sums_of(bucket)
    for index in range(size):
        changed = bucket.clone()
        changed.view(torch.int32)[index] ^= 1
        assert sums_of(changed) != before


@pytest.mark.parametrize("bit", [0, 22, 31])
@pytest.mark.parametrize("distance", [2, 8])
def test_equal_and_opposite_flips_in_a_bucket_do_not_cancel(bit: int, distance: int) -> None:
    """What a corrupt copy of the averaged gradient looks like; a plain sum of 64-bit lanes sees none of these."""
    bucket = torch.zeros(64)
    words = bucket.view(torch.int32)
    mask = (1 << bit) - (1 << 32 if bit == 31 else 0)
    words[4] = mask
    swapped = bucket.clone()
    swapped.view(torch.int32)[[4, 4 + distance]] ^= torch.tensor(mask, dtype=torch.int32)
    assert sums_of(swapped) != sums_of(bucket)


class Promotions:
    """A checkpoint store that only remembers what it was told."""

    def __init__(self) -> None:
        self.saved: list[SaveEvidence] = []
        self.promoted: list[int] = []
        self.newest_trusted = None
        self.root_uri = "file:///nowhere"

    def save(self, evidence: Any) -> Any:
        self.saved.append(evidence)

    def promote(self, clean_through: int) -> None:
        self.promoted.append(clean_through)


def test_one_rank_agreeing_with_itself_makes_nothing_trusted_and_says_so(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = make_model(), Promotions()
    attachment, optimizer = truestep.attach(model), optimizer_of(model)
    schedule = truestep.Schedule(audit_every=2, check_every=2)
    batches = (torch.full((2, 4), float(step)) for step in range(4))
    with caplog.at_level(logging.WARNING, "truestep"):
        alarm = truestep.train(model, attachment, optimizer, batches, loss_of, None, store, schedule)
    assert alarm is None
    assert store.promoted == []
    assert [evidence.step for evidence in store.saved] == [1, 3]
    assert not {"ring_replay", "update_replay"} & store.saved[-1].checks.keys()
    assert len([record for record in caplog.records if "no checkpoint becomes trusted" in record.getMessage()]) == 1


@pytest.mark.usefixtures("make_model")
def test_the_group_of_an_attached_model_is_kept_until_the_process_ends_or_a_later_one_is_attached() -> None:
    """The reducer of a model that outlives `destroy_process_group` would else end the group's threads with the GIL."""
    group = dist.new_group([0])
    attachment = truestep.attach(DistributedDataParallel(nn.Linear(4, 4), process_group=group))
    kept = weakref.ref(group)
    dist.destroy_process_group(group)
    del attachment, group
    gc.collect()
    assert kept() is not None
    assert dist.group.WORLD is not None
    group_lifetime.keep_until_exit(dist.group.WORLD)
    gc.collect()
    assert kept() is None, "destroyed long ago: its threads have let go of everything"


ENDS_WITH_A_CALLBACK = """
import time, torch, torch.distributed as dist
from truestep import group_lifetime

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group_lifetime.keep_until_exit(dist.group.WORLD)

def callback(future):
    until = time.monotonic() + 2.0
    print("begun", flush=True)
    while time.monotonic() < until:
        pass
    print("over", flush=True)

dist.all_reduce(torch.ones(1), async_op=True).get_future().then(callback)
time.sleep(0.1)
raise SystemExit(76)
"""


def test_a_process_ends_with_its_exit_code_and_only_after_what_a_gloo_thread_still_does() -> None:
    """The callback runs on Gloo's thread, under C++ that must not be unwound: cut short, torch mostly aborts."""
    command = [sys.executable, "-c", ENDS_WITH_A_CALLBACK]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (76, "begun\nover\n"), ended.stderr


def test_a_thread_inside_a_call_of_the_store_has_ended_before_python_shuts_down(
    monkeypatch: pytest.MonkeyPatch, make_model: MakeModel
) -> None:
    truestep.attach(make_model())
    monkeypatch.setattr(group_lifetime, "_ending", [])
    store, inside, ended = dist.HashStore(), threading.Event(), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            inside.set()
            with suppress(RuntimeError):
                store.wait(["never"], timedelta(seconds=0.3))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    group_lifetime.end_before_exit(asking, ended)
    assert inside.wait(5)
    group_lifetime._let_go()
    assert not asking.is_alive()
    assert group_lifetime._kept == []
