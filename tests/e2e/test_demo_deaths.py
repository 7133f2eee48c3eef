"""However the demo is killed, nothing of it is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.e2e.running_demo import demo

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@pytest.mark.parametrize(
    ("number", "mark"),
    [
        pytest.param(signal.SIGINT, "nodes with one GPU each", id="interrupted once the stack is up"),
        pytest.param(signal.SIGTERM, "job gpt-reference", id="terminated while pods start"),
        pytest.param(signal.SIGKILL, "gpt-reference: step 10", id="killed while it trains"),
    ],
)
def test_a_killed_demo_leaves_no_process_and_no_port(tmp_path: Path, number: signal.Signals, mark: str) -> None:
    log = tmp_path / "demo.log"
    with demo(tmp_path / "state", log) as process:
        _await_text(process, log, mark)
        family = psutil.Process(process.pid).children(recursive=True)
        ports = {connection.laddr.port for member in family for connection in _listening(member)}
        assert len(family) >= 3  # cloud, edge, cluster; and pods once they have started
        assert ports
        process.send_signal(number)
        code = process.wait(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert _still_using(tmp_path) == []
    assert code == (130 if number != signal.SIGKILL else -signal.SIGKILL), log.read_text()[-2000:]
    still = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.status == "LISTEN"}
    assert not ports & still


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
