"""The demo as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def demo(state_dir: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The demo as a process of its own session, with its output in `log`; killed at the end if it still runs."""
    environment = {**os.environ, "APPROVE": "auto", "TRUESTEP_DEMO_STATE_DIR": str(state_dir), "COLUMNS": "120"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "demo"],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
