"""Entry point of `make demo`.

Exit codes: 0 every claim holds; 1 a claim fails, or a person rejects; 2 a setting is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType

from demo.scenarios import tell
from demo.settings import SCENARIOS, DemoSettings, DemoSettingsError
from demo.stage import RejectedError, StoryError
from demo.view import View


def main() -> int:
    argparse.ArgumentParser(
        prog="make demo",
        description="Train, break a GPU, recover, and compare: the whole system on this machine.",
        epilog="Settings are environment variables: APPROVE=auto follows the approval link by itself; "
        f"SCENARIO={'|'.join(SCENARIOS)}; TRUESTEP_DEMO_STATE_DIR is emptied first (default .local/demo).",
    ).parse_args()
    try:
        settings = DemoSettings.from_environment(os.environ)
    except DemoSettingsError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _terminate)
    with View() as view:
        try:
            return tell(settings, view)
        except KeyboardInterrupt:
            view.stop_progress()
            view.line("interrupted; everything is stopped", style="yellow")
            return 130
        except RejectedError as rejection:
            view.panel("Rejected", str(rejection), style="yellow")
            return 1
        except StoryError as error:
            view.panel("The demo failed", str(error), style="red")
            return 1


def _terminate(_number: int, _frame: FrameType | None) -> None:
    # The same orderly way out as Ctrl-C.
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
