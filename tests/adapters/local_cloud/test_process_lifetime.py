"""Whatever happens to the process that started the stack, nothing of it stays: no process, no listening port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from local_stack import process
from tests.adapters.local_cloud.assembly import function, write_assembly

REPOSITORY = Path(__file__).parents[3]
PARENT = """
import sys
from pathlib import Path
from local_stack import LocalStack

with LocalStack(Path(sys.argv[1]), Path(sys.argv[2]), cluster=None) as stack:
    stack.client("lambda").invoke(FunctionName="test-Idle")  # so that a grandchild runs too
    print(stack.endpoint_url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    code = "def handler(event, context):\n    return None\n"
    assembly = write_assembly(
        tmp_path / "cdk.out", {"Idle": function("code.handler", Timeout=60)}, code={"code.py": code}
    )
    arguments = [sys.executable, "-c", PARENT, str(tmp_path / "state"), str(assembly)]
    with subprocess.Popen(
        arguments, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        yield started
        started.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_nothing_outlives_the_parent(parent: subprocess.Popen[str], how: signal.Signals | None) -> None:
    assert parent.stdout
    assert parent.stdin
    port = int(parent.stdout.readline().rsplit(":", 1)[1])
    family = psutil.Process(parent.pid).children(recursive=True)
    ports = {port} | {
        connection.laddr.port
        for member in family
        for connection in member.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    commands = " ".join(" ".join(member.cmdline()) for member in family)
    for part in ("local_stack.cloud.server", "local_stack.edge.server", "awslambdaric"):
        assert part in commands
    assert len(ports) >= 3

    if how is None:
        parent.stdin.close()
    else:
        parent.send_signal(how)
    parent.wait(timeout=30)

    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []
    for listening in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", listening)) != 0


CHILD_OF_CHILD = """
import subprocess, sys, threading, time
from local_stack.process import spawn
def start():
    # The thread that starts the child ends at once; the child must not end with it.
    spawn([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], watchdog={watchdog})
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""


@pytest.mark.parametrize("watchdog", [False, True])
def test_a_child_lives_longer_than_the_thread_that_started_it_and_no_longer_than_the_process(watchdog: bool) -> None:
    script = textwrap.dedent(CHILD_OF_CHILD).replace("{watchdog}", str(watchdog))
    arguments = [sys.executable, "-c", script]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout
        assert started.stdout.readline() == b"up\n"
        family = psutil.Process(started.pid).children(recursive=True)
        assert family
        _, alive = psutil.wait_procs(family, timeout=0.5)
        assert set(alive) == set(family)

        started.kill()
        _, alive = psutil.wait_procs(family, timeout=10)

    assert alive == []


def test_the_watchdog_ends_with_its_command() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD_OF_CHILD.replace("{watchdog}", "True").replace("time.sleep(600)", "pass")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert started.stdout
        assert started.stdout.readline() == b"up\n"
        members = [
            member
            for member in psutil.Process(started.pid).children(recursive=True)
            if member.status() != psutil.STATUS_ZOMBIE
        ]
        _, alive = psutil.wait_procs(members, timeout=5)
        assert [member for member in alive if member.status() != psutil.STATUS_ZOMBIE] == []
        assert started.poll() is None
        started.kill()


def test_stop_kills_what_does_not_heed_a_termination_together_with_its_children() -> None:
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    stubborn = process.spawn([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert stubborn.stdout
    assert stubborn.stdout.readline() == b"up\n"
    family = psutil.Process(stubborn.pid).children(recursive=True)

    process.stop([stubborn], grace_seconds=0.2)
    stubborn.stdout.close()

    assert stubborn.returncode == -signal.SIGKILL
    assert family
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [member for member in alive if member.status() != psutil.STATUS_ZOMBIE] == []


def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    script = "import sys; print('loading'); sys.exit('port taken')"
    pending = process.start_server("cloud", [sys.executable, "-c", script], log_path=tmp_path / "logs" / "cloud.log")

    with pytest.raises(process.ProcessError, match=r"(?s)cloud ended before it was ready.*port taken"):
        pending.wait_ready()


def test_a_server_that_never_announces_itself_is_stopped(tmp_path: Path) -> None:
    script = "import time; time.sleep(600)"
    pending = process.start_server("edge", [sys.executable, "-c", script], log_path=tmp_path / "edge.log")

    with pytest.raises(process.ProcessError, match=r"edge was not ready within 0\.2 s"):
        pending.wait_ready(timeout_seconds=0.2)

    assert pending.process.returncode is not None


def test_what_a_server_prints_after_its_announcement_is_its_log(tmp_path: Path) -> None:
    script = "import sys; print('{\"port\": 7}', flush=True); print('hello', flush=True)"
    log_path = tmp_path / "edge.log"
    pending = process.start_server("edge", [sys.executable, "-c", script], log_path=log_path)

    server = pending.wait_ready()
    server.process.wait(timeout=10)
    pending.join_output()

    assert server.announcement == {"port": 7}
    assert log_path.read_text() == "hello\n"


def test_a_command_that_does_not_exist_is_named() -> None:
    missing = process.spawn(["no-such-command-here"], stderr=subprocess.PIPE)

    _, errors = missing.communicate(timeout=10)

    assert missing.returncode == 127
    assert b"cannot start no-such-command-here" in errors


def test_a_working_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(process.ProcessError, match="nowhere"):
        process.spawn([sys.executable, "-c", "pass"], cwd=tmp_path / "nowhere")
