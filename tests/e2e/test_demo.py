"""The main job: the demo's story from fault to proof, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running_demo import REPOSITORY, demo

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def test_the_demo_finds_the_faulty_gpu_and_ends_with_the_fault_free_weights(tmp_path: Path) -> None:
    state_dir, log = tmp_path / "state", tmp_path / "demo.log"
    with demo(state_dir, log) as process:
        code = process.wait(timeout=400)
    assert code == 0, log.read_text()
    result = json.loads((state_dir / "result.json").read_text())
    assert len(result["proofs"]) == 8
    assert all(proof["holds"] for proof in result["proofs"]), result
    assert result["reference_fingerprint"] == result["recovered_fingerprint"]
    assert result["reference_fingerprint"].startswith("v1:")
    assert result["verdict"]["kind"] == "conclusive"
    assert result["verdict"]["cause"] == "open"


def test_an_unknown_scenario_or_approval_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    for variable, value in (("SCENARIO", "nonsense"), ("APPROVE", "yes")):
        done = subprocess.run(
            [sys.executable, "-m", "demo"],
            cwd=REPOSITORY,
            env={**os.environ, variable: value, "TRUESTEP_DEMO_STATE_DIR": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert value in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "state").exists()


def test_a_directory_that_no_demo_has_made_is_not_emptied(tmp_path: Path) -> None:
    keep = tmp_path / "thesis.tex"
    keep.write_text("years of work")
    with demo(tmp_path, tmp_path.parent / "demo.log") as process:
        assert process.wait(timeout=60) == 1
    assert keep.read_text() == "years of work"
