"""``truestep plan``, ``version``, ``fingerprint``, and what the command line needs in order to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.cli.conftest import Printed
from truestep import __version__
from truestep.fingerprint import combine, fingerprint_tensor
from truestep.plan import Workload, make_plan

Truestep = Callable[..., Printed]
JOB = ("plan", "--gpus", "1024", "--step-seconds", "5")


def run_python(code: str, *, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"], **(environment or {})}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def test_version_is_the_packages(truestep: Truestep) -> None:
    printed = truestep("--version")
    assert (printed.code, printed.out) == (0, f"truestep {__version__}\n")


def test_plan_prints_the_settings_that_the_library_computes(truestep: Truestep) -> None:
    printed = truestep(*JOB, "--hit-probability", "0.3")
    plan = make_plan(Workload(gpus=1024, step_seconds=5.0, hit_probability=0.3))
    assert printed.code == 0
    assert f"Schedule(audit_every={plan.audit_every}, check_every={plan.check_every}, " in printed.out
    assert f"VerifiedCheckpoints(..., keep={plan.keep})" in printed.out
    for setting in (f'"audit_interval_steps": {plan.audit_every}', '"assumed_hit_probability": 0.3', '"risk": 0.05'):
        assert f"  {setting}" in printed.out
    assert "0.3 *" in printed.out


def test_plan_as_json_is_the_plan_and_its_sensitivity(truestep: Truestep) -> None:
    document = json.loads(truestep(*JOB, "--hit-probability", "0.2", "--rollback", "margin", "--json").out)
    plan = document["plan"]
    assert plan["workload"]["rollback"] == "margin"
    assert plan["audit_every"] == next(
        row["audit_every"] for row in document["sensitivity"] if row["hit_probability"] == 0.2
    )
    assert [row["hit_probability"] for row in document["sensitivity"]] == [1.0, 0.3, 0.2, 0.1, 0.01, 0.001, 0.0001]
    parts = [plan["waste"][part] for part in ("audit_share", "check_share", "lost_share")]
    assert plan["waste"]["total"] == pytest.approx(sum(parts))


def test_plan_takes_the_published_rate_of_faults_as_hours_between_them(truestep: Truestep) -> None:
    document = json.loads(truestep(*JOB, "--gpu-hours-per-fault", "3.8e6", "--json").out)
    assert document["plan"]["hours_between_faults"] == pytest.approx(3.8e6 / 1024)


@pytest.mark.parametrize("gpus", ["1", "1024", "100000"])
def test_plan_fits_a_terminal_of_80_columns_and_no_cell_is_wrapped(truestep: Truestep, gpus: str) -> None:
    printed = truestep("plan", "--gpus", gpus, "--step-seconds", "5", "--hit-probability", "0.0001")
    lines = [line.rstrip() for line in printed.out.splitlines()]
    assert max(map(len, lines)) <= 80
    first, second = (lines.index(next(line for line in lines if head in line)) for head in ("steps  ", "    p "))
    assert [line for line in lines[first + 1 : first + 8] if line.startswith("   ")] == []
    assert [len(line.split()) >= 8 for line in lines[second + 1 : second + 7]] == [True] * 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hit-probability", "0"), "hit_probability is 0.0; give a probability above 0 and at most 1"),
        (("--risk", "1"), "risk is 1.0; give a probability between 0 and 1, both excluded"),
        (("--gpu-hours-per-fault", "0"), "gpu_hours_per_fault is 0.0; give a finite number above 0, in GPU-hours"),
        (("--checkpoint-every", "0"), "checkpoint_every is 0; give a whole number of at least 1"),
        (("--hit-probability", "1e-300"), "hit_probability is 1e-300; give at least 1e-12"),
        (("--gpu-hours-per-fault", "1e-9"), "faults per step of the job"),
        (("--step-seconds", "1e-12"), "faults per step of the job"),
        (("--check-cost-steps", "1e300"), "check_cost_steps is 1e+300; give at most 1e+15, in steps"),
        (("--gpus", "9" * 400), "gpus is above 1,000,000,000; give a whole number"),
        (("--plot", "/nowhere/at/all/waste.svg"), "/nowhere/at/all/waste.svg"),
        (("--gpus", "many"), "--gpus"),
        (("--rollback", "latest"), "--rollback"),
    ],
)
def test_plan_refuses_bad_input_with_code_2_and_no_traceback(
    truestep: Truestep, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options[0] == "--plot":
        pytest.importorskip("pygal")
    printed = truestep(*JOB, *options)
    assert (printed.code, printed.out) == (2, "")
    assert words in printed.complaint
    assert "Traceback" not in printed.err


def test_plot_says_what_it_needs_where_pygal_is_missing(
    truestep: Truestep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pygal", None)
    printed = truestep(*JOB, "--plot", str(tmp_path / "waste.svg"))
    assert printed.code == 2
    assert "--plot needs pygal: pip install 'truestep[plot]'" in printed.complaint


def test_plot_draws_a_curve_for_each_hit_probability(truestep: Truestep, tmp_path: Path) -> None:
    pytest.importorskip("pygal")
    path = tmp_path / "waste.svg"
    assert truestep(*JOB, "--plot", str(path)).code == 0
    text = path.read_text()
    assert text.count("<svg") == 1
    assert all(f"p = {p}" in text for p in ("1", "0.3", "0.1", "0.01", "0.001"))


def test_fingerprint_prints_what_the_library_computes(truestep: Truestep, tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(5, 3), "bias": torch.randn(3, dtype=torch.bfloat16)}
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "state.pt")
    expected = {f"model/{name}": str(fingerprint_tensor(tensor)) for name, tensor in tensors.items()}
    document = json.loads(truestep("fingerprint", str(tmp_path / "state.pt"), "--json").out)
    assert document["tensors"] == expected
    assert document["combined"] == combine(expected)
    lines = truestep("fingerprint", str(tmp_path / "state.pt")).out.splitlines()
    assert lines[0] == f"{expected['model/weight']}  model/weight"
    assert lines[-1] == f"{combine(expected)}  all 2 together"


def test_fingerprint_refuses_what_it_cannot_read(truestep: Truestep, tmp_path: Path) -> None:
    text, empty, code = tmp_path / "text.pt", tmp_path / "empty.pt", tmp_path / "code.pt"
    text.write_text("not an archive")
    torch.save({"epoch": 3}, empty)
    torch.save({"path": Path()}, code)
    for path, words in (
        (text, "was not written by torch.save, or is damaged"),
        (empty, "holds no tensor"),
        (code, "which is neither a tensor nor a plain value"),
        (tmp_path / "missing.pt", "is not a file"),
    ):
        printed = truestep("fingerprint", str(path))
        assert (printed.code, printed.out) == (2, "")
        assert words in printed.complaint
        assert "Traceback" not in printed.err


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_named_with_what_to_install(missing: str) -> None:
    done = run_python(
        f"import sys; sys.modules[{missing!r}] = None\nfrom truestep.cli import main\nmain(['--version'])"
    )
    assert done.returncode == 2
    assert done.stderr == f"truestep: the command line needs {missing}: pip install 'truestep[cli]'\n"


@pytest.mark.parametrize("arguments", [["--help"], list(JOB), ["--version"]])
def test_commands_that_need_neither_torch_nor_boto3_import_neither(arguments: list[str]) -> None:
    done = run_python(
        "import sys\n"
        "from truestep.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        "    print(*(name for name in ('torch', 'numpy', 'boto3') if name in sys.modules), file=sys.stderr)\n"
    )
    assert (done.returncode, done.stderr.split()) == (0, [])


def test_tensor_commands_say_that_torch_is_missing(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pt")
    blocked = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from truestep.cli import main\n"
        f"main(['fingerprint', {str(tmp_path / 'w.pt')!r}])"
    )
    done = run_python(blocked)
    assert done.returncode == 2
    assert "truestep fingerprint needs torch, which is not installed here" in " ".join(done.stderr.split())


def test_module_runs_as_the_entry_point_does() -> None:
    done = run_python(
        "import runpy, sys; sys.argv = ['truestep', '--version']; runpy.run_module('truestep.cli', None, '__main__')"
    )
    assert (done.returncode, done.stdout) == (0, f"truestep {__version__}\n")


def test_no_command_prints_help(truestep: Truestep) -> None:
    printed = truestep()
    assert printed.code == 2
    assert "checkpoints" in printed.out + printed.err
