"""The import contracts of pyproject.toml: each of them fails when it is broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = [
    contract["name"]
    for contract in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
]
BREAKAGES = {
    "the contract is a leaf: standard library only": ("truestep/contract/alarm.py", "import torch"),
    "the judge is pure: no torch, no boto3": ("truestep/judge.py", "import torch"),
    "the SDK knows nothing of the recovery": ("truestep/schedule.py", "import lambdas.settings"),
    "the domain is pure: no boto3, Kubernetes or Powertools": ("lambdas/domain/breaker.py", "import boto3"),
    "layers: handlers, adapters, ports, domain": ("lambdas/adapters/clock.py", "import lambdas.open_incident.handler"),
    "lambdas use only the contract of the SDK, and never torch": ("lambdas/settings.py", "import truestep.guard"),
    "nothing that ships imports the local stack or the demo": ("infra/paths.py", "import local_stack.stack"),
    "the local stack is wired from the template, not from the code that writes it": (
        "local_stack/template.py",
        "import infra.paths",
    ),
}
"""Contract -> a file, and the import that must not stand in it."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of everything that the contracts speak of."""
    root = tmp_path_factory.mktemp("packages")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "trainer_sdk" / "src" / "truestep", root / "truestep", ignore=ignore)
    for name in ("lambdas", "infra", "local_stack", "demo"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


def lint(root: Path) -> tuple[int, set[str]]:
    """Exit status of import-linter, and the names of the broken contracts."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, set(re.findall(r"^(.+) BROKEN", done.stdout, re.MULTILINE))


def test_every_contract_has_a_breakage_here() -> None:
    assert sorted(BREAKAGES) == sorted(CONTRACTS)


def test_the_tree_as_it_is_keeps_every_contract_and_each_breakage_is_found(packages: Path) -> None:
    assert lint(packages) == (0, set())
    for file, line in BREAKAGES.values():
        path = packages / file
        path.write_text(f"{path.read_text()}\n\ndef _broken() -> None:\n    {line}\n")
    code, broken = lint(packages)
    assert code == 1
    assert broken == set(CONTRACTS)
