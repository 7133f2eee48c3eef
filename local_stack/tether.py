"""Run a command that cannot outlive the process that started it, however that process ends.

    python tether.py --parent PID [--lifeline FD] -- COMMAND [ARGUMENT...]

On Linux the kernel kills the command (PR_SET_PDEATHSIG) when the thread that started it ends, SIGKILL included: the
setting is made here, between fork and exec, and survives the exec, so the command keeps this process's pid. The parent
may have died before the setting was made, so it is asked for once more afterwards. Elsewhere a watchdog holds the
reading end of a pipe (`--lifeline`) whose writing end only the parent has: end of file means that the parent is gone.

The command must use the same launcher for its own children: the setting is not inherited.
Standard library only and no import of the package: it runs before the command's environment counts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_USAGE = "usage: python tether.py --parent PID [--lifeline FD] -- COMMAND [ARGUMENT...]"


def main(arguments: Sequence[str]) -> int:
    """Tie this process to `--parent`, then become the command; returns only where that is impossible."""
    try:
        parent_pid, lifeline_fd, command = _parse(arguments)
    except ValueError as error:
        print(f"{error}\n{_USAGE}", file=sys.stderr)
        return 2
    if lifeline_fd is not None:
        _start_watchdog(lifeline_fd)
    else:
        _die_with_parent()
    if os.getppid() != parent_pid:
        return 1
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - becoming the command is what this launcher is for
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _parse(arguments: Sequence[str]) -> tuple[int, int | None, Sequence[str]]:
    if "--" not in arguments:
        raise ValueError("the command must come after --")
    split = list(arguments).index("--")
    options, command = list(arguments[:split]), arguments[split + 1 :]
    if not command:
        raise ValueError("no command after --")
    values: dict[str, int] = {}
    for name, value in zip(options[::2], options[1::2], strict=len(options) % 2 == 0):
        if name not in {"--parent", "--lifeline"} or not value.isdigit():
            raise ValueError(f"unknown option or value: {name} {value}")
        values[name] = int(value)
    return values.get("--parent", os.getppid()), values.get("--lifeline"), command


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _start_watchdog(lifeline_fd: int) -> None:
    """Fork a process that kills this one's group when the lifeline closes.

    The watchdog leaves the group first, so that it survives until the kill is sent; it ends by itself when the command
    ends, because it also holds a pipe whose writing end the command inherits.
    """
    alive_read, alive_write = os.pipe()
    group = os.getpgid(0)
    if os.fork() != 0:
        os.close(lifeline_fd)
        os.close(alive_read)
        os.set_inheritable(alive_write, True)
        return
    os.setsid()
    os.close(alive_write)
    import select

    readable, _, _ = select.select([lifeline_fd, alive_read], [], [])
    if lifeline_fd in readable:
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
