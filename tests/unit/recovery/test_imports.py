"""The handlers load fast, and without what a training image has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lambdas.settings import FUNCTION_VARIABLES

BLOCKED = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; "


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_handler_imports_without_torch_and_reads_no_environment() -> None:
    names = ", ".join(f"lambdas.{function}.handler" for function in FUNCTION_VARIABLES)
    check = (
        "import os; before = dict(os.environ); "
        "os.environ.clear(); os.environ.update({k: v for k, v in before.items() if k.startswith(('PYTHON', 'PATH'))}); "
        f"sys.path[:0] = {sys.path!r}; import {names}; "
        f"assert all(callable(sys.modules[f'lambdas.{{n}}.handler'].handler) for n in {list(FUNCTION_VARIABLES)!r}); "
        "print('imported')"
    )
    assert run(BLOCKED + check).strip() == "imported"


@pytest.mark.parametrize("function", ["decide_approval", "receive_alarm"])
def test_a_cold_start_costs_less_than_a_second_of_processor_time(function: str) -> None:
    code = (
        f"{BLOCKED} sys.path[:0] = {sys.path!r}; import time; start = time.process_time(); "
        f"import lambdas.{function}.handler; print(time.process_time() - start)"
    )
    assert float(run(code)) < 1.0
