"""What every test process starts with."""

from __future__ import annotations

import signal

# A shell's background job ignores SIGINT, and so would every process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
