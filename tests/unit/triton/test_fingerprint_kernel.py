"""The Triton kernel, run by Triton's interpreter on the CPU: the same program that a GPU runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install --group triton)")
def test_the_kernel_equals_the_definition_under_the_interpreter() -> None:
    cases = Path(__file__).with_name("interpreted_kernel.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=cases.parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
