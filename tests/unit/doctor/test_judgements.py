"""What follows from what was seen, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import truestep
from truestep.attachment import Attachment
from truestep.checks.ring_replay import AuditSetupError, RingReplayAudit
from truestep.checks.topology import Ring
from truestep.contract import NodeName, Rank
from truestep.doctor import Diagnosis, Examined, Level, Observation, examine
from truestep.doctor.diagnosis import Steadiness, judge_repeats
from truestep.doctor.environment import examine_modules, numerical_settings, settings_differences
from truestep.doctor.examination import prove
from truestep.doctor.tracing import OperationTrace, first_difference, operation_of
from truestep.loss import LossError, require_scalar

NODES = {Rank(rank): NodeName(f"node-{rank}") for rank in range(4)}
SAME = ["a", "a"]


def test_without_a_batch_the_doctor_and_the_guard_each_say_where_to_give_one(
    world_of_one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_of_one(tmp_path):
        model = DistributedDataParallel(nn.Linear(2, 1))
        attachment = truestep.attach(model)
        monkeypatch.setattr(Attachment, "nodes", property(lambda _: NODES))
        examined = Examined(model, lambda model, batch: model(batch).sum())
        audit = RingReplayAudit(
            attachment, model.module, Ring(NODES), examined.compute_loss, None, compare_gradients=True
        )
        diagnosis = examine(attachment, examined)
        assert [o.message for o in diagnosis.observations if o.level is Level.REFUSED] == [
            "there is no batch to try: give Examined(batch=...), or Examined(rebuild_batch=...)"
        ]
        with pytest.raises(
            AuditSetupError, match=r"give one to start_step\(step, batch\), or rebuild_batch to the guard"
        ):
            prove(attachment, examined, audit, deterministic=True)


@pytest.mark.parametrize(
    ("runs", "steadiness", "ranks"),
    [
        ([SAME, SAME, SAME], Steadiness.EQUAL, ()),
        ([SAME, ["b", "b"], SAME], Steadiness.ONE_NODE, (1,)),
        ([SAME, ["b", "c"], SAME], Steadiness.ONE_NODE, (1,)),
        ([SAME, ["a", "b"]], Steadiness.UNREPEATABLE, (1,)),
        ([["a", "b"], ["a", "c"], SAME], Steadiness.UNREPEATABLE, (0, 1)),
        ([["a", "b"], ["c", "d"], ["e", "f"]], Steadiness.UNREPEATABLE, (0, 1, 2)),
        ([SAME, ["b", "b"]], Steadiness.UNEQUAL, (1,)),
        ([SAME, ["b", "b"], ["c", "c"]], Steadiness.UNEQUAL, (1, 2)),
        ([SAME, SAME, ["b", "b"], ["b", "b"]], Steadiness.UNEQUAL, (2, 3)),
    ],
)
def test_one_node_alone_is_suspect_and_several_are_software(
    runs: list[list[str]], steadiness: Steadiness, ranks: tuple[int, ...]
) -> None:
    nodes = {rank: node for rank, node in NODES.items() if rank < len(runs)}
    found = judge_repeats(runs, nodes)
    assert (found.steadiness, found.ranks) == (steadiness, ranks)
    assert found.reference not in ranks or steadiness is Steadiness.UNREPEATABLE


def test_two_ranks_of_one_node_count_as_one_node() -> None:
    nodes = {Rank(rank): NodeName(f"node-{rank // 2}") for rank in range(6)}
    found = judge_repeats([SAME, SAME, ["b", "b"], ["c", "c"], SAME, SAME], nodes)
    assert (found.steadiness, found.ranks) == (Steadiness.ONE_NODE, (2, 3))


def test_a_setting_that_differs_is_told_with_the_smaller_group_first() -> None:
    rows = [numerical_settings() for _ in range(4)]
    assert settings_differences(rows) == []
    rows[2]["numpy"] = "1.0"
    (sentence,) = settings_differences(rows)
    assert sentence.startswith("numpy is 1.0 on rank 2, ")
    assert sentence.endswith("on ranks 0, 1, 3")


def test_coverage_is_lost_by_one_downgrade() -> None:
    note = Observation(subject="nodes", level=Level.NOTE, message="two nodes")
    lost = Observation(subject="kernels", level=Level.LOSS_ONLY, message="no repeat")
    assert Diagnosis(observations=(note,)).coverage == "loss and gradients"
    assert Diagnosis(observations=(note, lost)).coverage == "loss only: backward not covered"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ((torch.zeros(()), 1), "returned tuple"),
        ({"loss": torch.zeros(())}, "return its loss alone"),
        (0.5, "returned float"),
        (torch.zeros(3), r"shape \(3,\): return its mean\(\)"),
        (torch.zeros((), dtype=torch.int64), "floating point"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused_with_advice(loss: Any, words: str) -> None:
    with pytest.raises(LossError, match=words):
        require_scalar(loss)


def test_one_element_in_any_shape_is_one_number() -> None:
    for loss in (torch.ones(()), torch.ones(1, 1, dtype=torch.bfloat16)):
        assert require_scalar(loss) is loss


class Scaled(nn.Module):
    """Multiplies by what it is told."""

    factor = 2.0

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factor


@pytest.fixture
def traced() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 1))
    batch = torch.ones(2, 4)

    def run() -> list[Any]:
        with OperationTrace(model) as trace:
            model(batch).square().sum().backward()
        return trace.operations

    return model, run


def test_traces_of_the_same_pass_are_equal_and_the_first_operation_that_differs_is_named(traced: Any) -> None:
    model, run = traced
    first = run()
    assert len(first) > 10
    assert first_difference(first, run()) is None
    model[1].factor = 2.5
    changed = first_difference(first, run())
    assert str(changed) == "aten.mul in 1 (Scaled)"
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == [0] * 4


def test_operations_of_the_backward_belong_to_the_module_of_their_forward(traced: Any) -> None:
    _, run = traced
    backward = [(o.place, o.kernel) for o in run() if o.place.startswith("backward")]
    assert ("backward of 1 (Scaled)", "aten.mul (MulBackward0)") in backward
    assert any(place == "backward of 2 (Linear)" and "AddmmBackward0" in kernel for place, kernel in backward)
    assert any(place == "backward of compute_loss" and "PowBackward0" in kernel for place, kernel in backward)


def test_a_warning_is_matched_with_the_operation_that_it_names(traced: Any) -> None:
    _, run = traced
    operations = run()
    assert str(operation_of("addmm_cuda does not have a deterministic implementation", operations)).startswith(
        "aten.addmm in 0 (Linear)"
    )
    assert operation_of("histc_cuda does not have a deterministic implementation", operations) is None


@pytest.fixture
def one_process(world_of_one: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRUESTEP_OUTBOX_DIR", str(tmp_path / "outbox"))
    with world_of_one(tmp_path):
        yield


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiling_in_place_goes_loss_only_unless_ddp_leaves_graphs_whole(one_process: None) -> None:
    import torch._dynamo

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    assert examine_modules(model) == []
    model.module[0].compile()
    (found,) = examine_modules(model)
    assert (found.subject, found.level) == ("compilation", Level.LOSS_ONLY)
    assert "0 was compiled in place" in found.message or "module.0 was compiled in place" in found.message
    assert "optimize_ddp = False" in found.message
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert examine_modules(model) == []
    assert examine_modules(DistributedDataParallel(torch.compile(nn.Linear(2, 2)))) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_ddp_model_is_refused_at_attach_with_the_way_that_works(one_process: None) -> None:
    compiled = torch.compile(DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"DistributedDataParallel\(torch\.compile\(model\)\)"):
        truestep.attach(compiled)  # type: ignore[arg-type]
