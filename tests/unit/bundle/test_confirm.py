"""`truestep confirm`: a faulty device is shown with its hit rate and place, a healthy one with nothing, bad input
refused."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.bundle.computation import ALARM, FACTORY, STEP, Witness, build, squared, weighed_by_place, wrong
from truestep.bundle.confirming import Confirmation, confirm, load_factory
from truestep.bundle.contents import BUNDLE_NAME, BundleError
from truestep.bundle.failing import ChosenPass
from truestep.bundle.reading import open_bundle
from truestep.checks.isolation import standing_group
from truestep.cli.application import run
from truestep.contract import Rank, wilson_interval
from truestep.inject import FAULT_VARIABLE

FLIP = {"site": "module_output", "target": "blocks.0", "element": 3, "bit": 20}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    said = Witness().write(tmp_path_factory.mktemp("root"))
    assert "bundle_failed" not in said, said
    return said["bundle_uri"]


def confirmed(uri: str, repeat: int = 5, **options: Any) -> Confirmation:
    model, compute_loss = load_factory(FACTORY)
    return confirm(open_bundle(uri), model, compute_loss, torch.device("cpu"), repeat=repeat, **options)


def test_a_healthy_device_never_differs_whatever_state_its_process_is_in(uri: str) -> None:
    torch.manual_seed(99)
    random.seed(5)
    found = confirmed(uri, repeat=8)
    assert (found.runs, found.differing, found.differs, found.hit_rate) == (8, 0, False, 0.0)
    assert found.hit_rate_low == 0.0
    assert 0.3 < found.hit_rate_high < 0.4
    assert found.simulated_fault is False


def test_a_loss_that_asks_for_its_rank_gets_the_recorded_one_without_a_process_group(tmp_path: Path) -> None:
    with standing_group(2, 3):
        said = Witness(weighed_by_place).write(tmp_path)
    assert not dist.is_initialized()
    found = confirm(open_bundle(said["bundle_uri"]), build()[0], weighed_by_place, torch.device("cpu"), repeat=3)
    assert (found.runs, found.differing) == (3, 0)
    assert not dist.is_initialized()
    found = confirm(open_bundle(said["bundle_uri"]), build()[0], squared, torch.device("cpu"), repeat=3)
    assert found.differing == 3, "the rank's weight counts"


def test_a_fault_that_always_hits_is_reproduced_and_located(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(FLIP))
    found = confirmed(uri, repeat=6)
    assert (found.differing, found.hit_rate, found.hit_rate_high) == (6, 1.0, 1.0)
    assert found.first_modules == {"forward blocks.0": 6}
    assert found.losses_differing == 6
    assert found.parameters["first.weight"] == 6
    assert found.simulated_fault


def test_a_fault_in_the_backward_is_located_there(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps({**FLIP, "site": "gradient"}))
    found = confirmed(uri, repeat=3)
    assert found.first_modules == {"backward blocks.0": 3}
    assert found.losses_differing == 0
    assert "blocks.1.weight" not in found.parameters, "the backward had passed it before it went wrong"
    assert found.parameters["blocks.0.weight"] == 3


def test_the_hit_rate_of_a_rare_fault_is_counted_exactly(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps({**FLIP, "probability": 0.3, "seed": 11}))
    draws = random.Random(11)  # noqa: S311
    hits = sum(draws.random() < 0.3 for _ in range(60))
    found = confirmed(uri, repeat=60)
    assert 0 < hits < 60
    assert (found.runs, found.differing) == (60, hits)
    assert found.hit_rate_low < 0.3 < found.hit_rate_high
    assert found.first_modules == {"forward blocks.0": hits}


def test_a_fault_outside_its_window_does_not_strike(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps({**FLIP, "first_step": STEP + 1}))
    assert confirmed(uri).differing == 0


def test_a_fault_of_the_memory_does_not_break_the_replay(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps({"site": "weight", "target": "first.weight"}))
    assert confirmed(uri).differing == 0


def test_tracing_does_not_change_what_is_computed(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert confirmed(uri, locate=False).differing == 0
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(FLIP))
    found = confirmed(uri, locate=False)
    assert (found.differing, found.first_modules, found.located) == (5, {}, "not asked for")


def test_without_a_majority_the_device_is_held_against_itself(tmp_path: Path) -> None:
    witness = Witness()
    chosen = ChosenPass(producer=Rank(0), replayer=Rank(1), parties=(Rank(0), Rank(1)), reference=None, writer=Rank(0))
    found = confirmed(witness.write(tmp_path, failing=witness.failing(chosen=chosen))["bundle_uri"])
    assert (found.differing, found.settled) == (0, False)
    assert "nothing settled" in found.reference


def test_a_loss_only_audit_compares_losses_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness()
    uri = witness.write(tmp_path, failing=witness.failing(compares_gradients=False))["bundle_uri"]
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps({**FLIP, "site": "gradient"}))
    assert confirmed(uri).differing == 0
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(FLIP))
    assert confirmed(uri).differing == 5


def test_a_record_that_the_device_never_gives_differs_every_time(tmp_path: Path) -> None:
    witness = Witness()
    found = confirmed(witness.write(tmp_path, failing=witness.failing(own=wrong(witness.result)))["bundle_uri"])
    assert found.differing == found.runs == found.losses_differing
    assert "own result again" in found.located


@pytest.mark.parametrize(
    ("hits", "runs", "low", "high"),
    [
        (0, 1000, 0.0, 0.00382671),
        (1, 10, 0.01787621, 0.40415003),
        (5, 10, 0.23659309, 0.76340691),
        (10, 10, 0.7224672, 1),
        (1, 1, 0.20654931, 1),
        (20, 20, 0.83887483, 1),
    ],
)
def test_wilson_interval_against_published_values(hits: int, runs: int, low: float, high: float) -> None:
    assert wilson_interval(hits, runs) == pytest.approx((low, high), abs=1e-6)


def test_other_versions_are_refused_or_prove_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = Witness().write(tmp_path)["bundle_uri"]
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    arguments = ["confirm", uri, "--device", "cpu", "--repeat", "2"]
    assert run_cli(arguments) == 2
    assert "torch is 2.1.0 here and was" in joined(capsys.readouterr().err)
    assert run_cli([*arguments, "--allow-version-mismatch"]) == 0
    assert "Nothing follows either way" in joined(capsys.readouterr().out)


def test_exit_codes_and_json(uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["confirm", uri, "--device", "cpu", "--repeat", "4", "--json"]
    assert run_cli(arguments) == 0
    healthy = json.loads(capsys.readouterr().out)
    assert (healthy["runs"], healthy["differing"], healthy["differs"]) == (4, 0, False)
    assert "proves nothing" in healthy["conclusion"]
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(FLIP))
    assert run_cli(arguments) == 1
    faulty = json.loads(capsys.readouterr().out)
    assert (faulty["differing"], faulty["alarm_id"], faulty["step"]) == (4, ALARM, STEP)


def test_what_people_read(uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli(["confirm", uri, "--device", "cpu", "--repeat", "3"]) == 0
    assert "No difference proves nothing" in joined(capsys.readouterr().out)
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(FLIP))
    assert run_cli(["confirm", uri, "--device", "cpu", "--repeat", "3"]) == 1
    text = joined(capsys.readouterr().out)
    assert "A simulated fault is in place" in text
    assert "3 of 3 runs differ: hit rate 100%" in text
    assert "forward blocks.0" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--model", "nowhere:build"], "cannot be built here"),
        (["--model", "nonsense"], "not of the form module:function"),
        (["--model", "tests.unit.bundle.computation:build_nothing"], "must return (model, compute_loss)"),
        (["--model", "torch.nn:Module"], "must return (model, compute_loss)"),
        (["--device", "tpu:9"], "is not one"),
        (["--device", "cuda:77"], "is not here"),
    ],
)
def test_bad_requests_say_what_to_do(
    uri: str, change: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["confirm", uri, "--device", "cpu", "--repeat", "1", *change]) == 2
    assert expected in joined(capsys.readouterr().err)


def test_a_bundle_without_a_model_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = Witness().write(tmp_path, model="")["bundle_uri"]
    assert run_cli(["confirm", uri, "--device", "cpu", "--repeat", "1"]) == 2
    assert "give --model module:function" in joined(capsys.readouterr().err)
    assert run_cli(["confirm", uri, "--device", "cpu", "--repeat", "1", "--model", FACTORY]) == 0


def test_a_model_or_weights_that_are_still_wrapped_in_ddp_are_told_so(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = torch.nn.Module()
    wrapped.module = build()[0]
    with pytest.raises(BundleError, match=r"still wrapped in DistributedDataParallel: return \(ddp_model.module"):
        confirm(open_bundle(uri), wrapped, lambda *_: None, torch.device("cpu"), repeat=1)
    lines = (
        "import torch",
        "def build():",
        "    model = torch.nn.Linear(2, 2)",
        "    model.load_state_dict({f'module.{name}': value for name, value in model.state_dict().items()})",
    )
    (tmp_path / "loads_wrapped.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(BundleError, match="The bundle brings the weights: leave the loading out"):
        load_factory("loads_wrapped:build")


def test_a_model_that_is_not_the_runs_is_refused(uri: str) -> None:
    with pytest.raises(BundleError, match="the model is not the run's: parameters missing"):
        confirm(open_bundle(uri), torch.nn.Linear(2, 2), lambda *_: None, torch.device("cpu"), repeat=1)
    model, _ = build()
    model.first = torch.nn.Linear(6, 9)
    with pytest.raises(BundleError, match=r"first\.weight is \(9, 6\), the run's \(8, 6\)"):
        confirm(open_bundle(uri), model, lambda *_: None, torch.device("cpu"), repeat=1)


def test_a_computation_that_raises_at_once_is_bad_input_later_a_finding(uri: str) -> None:
    model, compute_loss = build()
    with pytest.raises(BundleError, match="cannot be run here: KeyError"):
        confirm(open_bundle(uri), model, lambda *_: {}["x"], torch.device("cpu"), repeat=3)
    calls = []

    def dies(stage: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return compute_loss(stage, batch)

    found = confirm(open_bundle(uri), build()[0], dies, torch.device("cpu"), repeat=5)
    assert (found.runs, found.differing, found.differs) == (2, 0, True)
    assert "run 3 raised RuntimeError: device lost" in found.raised


@pytest.mark.parametrize("name", ["inputs.pt", "weights.pt", "recorded.json"])
def test_a_damaged_file_is_found_before_anything_is_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = Witness().write(tmp_path)["bundle_uri"]
    path = tmp_path / "bundles" / ALARM / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    code = run_cli(["confirm", uri, "--device", "cpu", "--repeat", "1"])
    message = joined(capsys.readouterr().err)
    assert code == 2
    assert name in message
    assert "SHA-256" in message


def test_a_directory_without_its_marker_is_no_bundle(tmp_path: Path) -> None:
    uri = Witness().write(tmp_path)["bundle_uri"]
    (tmp_path / "bundles" / ALARM / BUNDLE_NAME).unlink()
    with pytest.raises(BundleError, match="written last"):
        open_bundle(uri)
    with pytest.raises(BundleError, match="is not a directory"):
        open_bundle(str(tmp_path / "nowhere"))


def test_a_path_and_the_marker_itself_name_a_bundle_too(uri: str) -> None:
    path = Path(uri.removeprefix("file://"))
    assert open_bundle(str(path)).uri == open_bundle(f"{uri}/{BUNDLE_NAME}").uri == uri


def test_a_batch_with_classes_of_its_own_is_read_only_where_that_is_allowed(tmp_path: Path) -> None:
    witness = Witness()
    rows, targets = witness.batch
    inputs = replace(witness.inputs, batch=Pair(rows, targets))
    uri = witness.write(tmp_path, failing=witness.failing(payload=inputs.to_bytes()))["bundle_uri"]
    with pytest.raises(BundleError, match="--allow-classes"):
        confirmed(uri)
    found = confirmed(uri, allow_classes=True)
    assert found.differing == 0


class Pair(tuple[Any, ...]):
    """A batch of a class of its own."""

    def __new__(cls, *parts: Any) -> Pair:
        return super().__new__(cls, parts)

    def __reduce__(self) -> Any:
        return Pair, tuple(self)


def run_cli(arguments: list[str]) -> int:
    """The exit code, however it is told."""
    try:
        return run(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)


def joined(text: str) -> str:
    """Text without the wrapping."""
    return " ".join(text.split())
