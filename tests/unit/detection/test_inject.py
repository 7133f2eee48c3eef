"""A fault really changes what it claims to change, on the pass it claims, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from truestep import inject
from truestep.contract import ContractError
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer, fingerprint_tensor
from truestep.inject import Fault, arm
from truestep.replay import PassInputs, replay
from truestep.rng import capture


@pytest.fixture
def model(world_of_one: Any, tmp_path: Path) -> Iterator[DistributedDataParallel]:
    torch.manual_seed(0)
    with world_of_one(tmp_path):
        yield DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def gradients(model: nn.Module) -> dict[str, str]:
    model.zero_grad()
    loss: Tensor = model(torch.ones(3, 4)).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: str(fingerprint_tensor(p.grad)) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("site", "target"), [("module_output", "2"), ("gradient", "2"), ("parameter_gradient", "2.weight")]
)
@pytest.mark.parametrize("kind", ["bit_flip", "relative", "nan", "inf", "null"])
def test_fault_in_a_pass_changes_gradients_inside_its_window_only(
    model: DistributedDataParallel, site: str, target: str, kind: str
) -> None:
    step = [0]
    clean = gradients(model)
    fault = Fault(site=site, target=target, model=kind, element=1, elements=2, bit=22, first_step=3, last_step=4)
    armed = arm(model, optimizer_of(model), fault, current_step=lambda: step[0])
    for number in range(7):
        step[0] = number
        assert (gradients(model) != clean) == (3 <= number <= 4)
    assert armed.steps == [3, 4]
    armed.remove()
    step[0] = 3
    assert gradients(model) == clean


def test_fault_on_a_device_hits_replays_on_that_device_too(model: DistributedDataParallel) -> None:
    inputs = PassInputs(batch=torch.ones(3, 4), rng=capture(), buffers={})

    def loss(stage: Any, batch: Tensor) -> Tensor:
        value: Tensor = stage(batch).square().sum()
        return value

    clean = replay(model.module, inputs, loss)
    armed = arm(model, optimizer_of(model), Fault(site="module_output", target="2", bit=22), current_step=lambda: 0)
    assert replay(model.module, inputs, loss).gradients != clean.gradients
    assert armed.firings == 1


@pytest.mark.parametrize(("site", "target"), [("module_output", "2"), ("parameter_gradient", "2.weight")])
def test_a_phase_confines_a_fault_to_replays_or_to_training_and_an_oracle_can_suspend_it(
    model: DistributedDataParallel, site: str, target: str
) -> None:
    def loss(stage: Any, batch: Tensor) -> Tensor:
        value: Tensor = stage(batch).square().sum()
        return value

    inputs = PassInputs(batch=torch.ones(3, 4), rng=capture(), buffers={})
    clean_replay, clean_training = replay(model.module, inputs, loss).gradients, gradients(model)
    for phase in ("any", "training", "replay"):
        fault = Fault(site=site, target=target, bit=22, phase=phase)
        armed = arm(model, optimizer_of(model), fault, current_step=lambda: 0)
        assert (replay(model.module, inputs, loss).gradients == clean_replay) == (phase == "training")
        assert (gradients(model) == clean_training) == (phase == "replay")
        armed.suspended = True
        assert replay(model.module, inputs, loss).gradients == clean_replay
        assert gradients(model) == clean_training
        armed.remove()


def test_runs_and_stuck_bits_change_what_they_say(model: DistributedDataParallel) -> None:
    armed = arm(model, optimizer_of(model), Fault(site="weight", target="2.bias", elements=3), current_step=lambda: 0)
    values = torch.zeros(5)
    armed.corrupt_(values)
    assert values.ne(0).tolist() == [True, True, True, False, False]
    stuck = Fault(site="weight", target="2.bias", model="stuck", bit=30)
    armed = arm(model, optimizer_of(model), stuck, current_step=lambda: 0)
    for _ in range(2):
        armed.corrupt_(values)
    assert float(values[0]) == 2.0
    assert armed.firings == 0, "the run of before had set that bit already: nothing changed, so nothing is counted"


def test_weight_fault_flips_exactly_the_named_bit_after_the_update(model: DistributedDataParallel) -> None:
    optimizer = optimizer_of(model)
    fault = Fault(site="weight", target="2.weight", element=5, bit=9)
    gradients(model)
    armed = arm(model, optimizer, fault, current_step=lambda: 0)
    before = {name: p.clone() for name, p in model.module.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    optimizer.step()
    differences = {
        name: (p.view(torch.int32) ^ before[name].view(torch.int32)).flatten().tolist()
        for name, p in model.module.named_parameters()
    }
    assert {name for name, bits in differences.items() if any(bits)} == {"2.weight"}
    assert differences["2.weight"] == [0] * 5 + [1 << 9] + [0] * 2
    assert armed.firings == 1


def test_optimizer_state_fault_leaves_the_weights_alone(model: DistributedDataParallel) -> None:
    optimizer = optimizer_of(model)
    gradients(model)
    optimizer.step()
    weights, state = fingerprint_model(model)[0], fingerprint_optimizer(optimizer)[1]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    armed = arm(
        model, optimizer, Fault(site="optimizer_state", target="2.bias/exp_avg_sq", bit=0), current_step=lambda: 0
    )
    model.zero_grad(set_to_none=True)
    optimizer.step()
    after = fingerprint_optimizer(optimizer)[1]
    assert fingerprint_model(model)[0] == weights
    assert {name for name in state if state[name] != after[name] and not name.startswith("group")} == {"0.3/exp_avg_sq"}
    assert armed.firings == 1


def test_probability_and_number_of_passes_limit_the_hits_reproducibly(model: DistributedDataParallel) -> None:
    def hits(**fields: Any) -> int:
        armed = arm(
            model,
            optimizer_of(model),
            Fault(site="module_output", target="0", bit=22, **fields),
            current_step=lambda: 0,
        )
        for _ in range(50):
            gradients(model)
        armed.remove()
        return armed.firings

    assert 5 < hits(probability=0.3, seed=1) < 25
    assert hits(probability=0.3, seed=1) == hits(probability=0.3, seed=1)
    assert hits(passes=2) == 2


def test_drawing_hits_leaves_the_training_streams_alone(model: DistributedDataParallel) -> None:
    before = capture().fingerprint()
    arm(model, optimizer_of(model), Fault(site="module_output", target="0", probability=0.5), current_step=lambda: 0)
    gradients(model)
    assert capture().fingerprint() == before


def test_fault_survives_json_and_comes_from_the_environment(
    model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(site="gradient", target="2", model="nan", element=3, last_step=9)
    assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault
    monkeypatch.delenv(inject.FAULT_VARIABLE, raising=False)
    assert inject.from_environment(model, optimizer_of(model)) is None
    monkeypatch.setenv(inject.FAULT_VARIABLE, json.dumps(fault.to_json()))
    armed = inject.from_environment(model, optimizer_of(model), current_step=lambda: 0)
    assert armed is not None
    assert armed.fault == fault
    monkeypatch.setenv(inject.FAULT_VARIABLE, "{")
    with pytest.raises(ContractError, match="not JSON"):
        inject.from_environment(model, optimizer_of(model), current_step=lambda: 0)
    wrong = {"bit": "20"}, {"model": "melt"}, {"target": "no.such"}, {"frist_step": 6}
    for change, named in zip(wrong, ("bit", "melt", "no.such", "frist_step"), strict=True):
        monkeypatch.setenv(inject.FAULT_VARIABLE, json.dumps(fault.to_json() | change))
        with pytest.raises(ContractError, match=f"^{inject.FAULT_VARIABLE} cannot be used: .*{named}"):
            inject.from_environment(model, optimizer_of(model), current_step=lambda: 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"site": "cache"}, "site 'cache' is not one of"),
        ({"model": "melt"}, "model 'melt' is not one of"),
        ({"bit": 64}, "bit 64"),
        ({"probability": 0.0}, "above 0"),
        ({"first_step": 3, "last_step": 2}, "ends"),
        ({"site": "optimizer_state"}, "parameter/key"),
        ({"passes": 0}, "passes"),
    ],
)
def test_senseless_faults_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Fault.from_json({"site": "weight", "target": "w", **fields})


def test_unknown_targets_are_refused_with_the_known_ones(model: DistributedDataParallel) -> None:
    with pytest.raises(
        ValueError, match=r"'missing', and no module has that name; there are 0, 1, 2; an empty .* whole model"
    ):
        arm(model, optimizer_of(model), Fault(site="gradient", target="missing"), current_step=lambda: 0)
    many = {f"layers.{index}.{kind}": None for index in range(40) for kind in ("attention", "mlp")}
    listed = inject._listed(many, "layers.17.attn")
    assert listed.startswith("there are layers.17.attention, ")
    assert listed.endswith(f" and {80 - inject.SHOWN_NAMES} more")
    with pytest.raises(ValueError, match=r"call truestep\.attach"):
        arm(model, optimizer_of(model), Fault(site="gradient", target="2"))
