"""The main job: the demo's story from fault to proof, and its end however it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


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


def test_the_demo_finds_the_faulty_gpu_and_ends_with_the_fault_free_weights(tmp_path: Path) -> None:
    state_dir, log = tmp_path / "state", tmp_path / "demo.log"
    with demo(state_dir, log) as process:
        code = process.wait(timeout=400)
    assert code == 0, log.read_text()
    result = json.loads((state_dir / "result.json").read_text())
    assert len(result["proofs"]) == 7
    assert all(proof["holds"] for proof in result["proofs"]), result
    assert result["reference_fingerprint"] == result["recovered_fingerprint"]
    assert result["reference_fingerprint"].startswith("v1:")
    assert result["verdict"]["kind"] == "conclusive"
    assert result["verdict"]["cause"] == "open"


@pytest.mark.parametrize(
    ("number", "mark"),
    [
        pytest.param(signal.SIGINT, "job gpt-reference", id="interrupted while pods start"),
        pytest.param(signal.SIGTERM, "gpt-reference: step 10", id="terminated while it trains"),
        pytest.param(signal.SIGKILL, "Corruption alarm at step", id="killed while the job holds"),
    ],
)
def test_a_killed_demo_leaves_no_process_and_no_port(tmp_path: Path, number: signal.Signals, mark: str) -> None:
    log = tmp_path / "demo.log"
    with demo(tmp_path / "state", log) as process:
        _await_text(process, log, mark)
        family = psutil.Process(process.pid).children(recursive=True)
        ports = {connection.laddr.port for member in family for connection in _listening(member)}
        assert len(family) > 5
        assert ports
        process.send_signal(number)
        code = process.wait(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert _still_using(tmp_path) == []
    assert code == (130 if number != signal.SIGKILL else -signal.SIGKILL), log.read_text()[-2000:]
    still = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.status == "LISTEN"}
    assert not ports & still


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


def _await_text(process: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Wait until the demo has printed `text`, or has ended."""
    for _ in range(3000):
        if text in log.read_text(errors="replace"):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            raise AssertionError(f"the demo ended before it printed {text!r}:\n{log.read_text()}")
    raise AssertionError(f"{text!r} did not appear within 300 s:\n{log.read_text()}")


def _still_using(directory: Path) -> list[str]:
    """Command lines of processes that were started with or inside `directory`: also those that no snapshot saw."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(directory) in " ".join([*process.cmdline(), process.cwd()]):
                found.append(" ".join(process.cmdline()))
    return found


def _listening(member: psutil.Process) -> list[psutil._common.pconn]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [connection for connection in member.net_connections("tcp") if connection.status == "LISTEN"]
    return []
