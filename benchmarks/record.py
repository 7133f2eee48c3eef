"""What a stored result says beside its figures: the command, the machine, and how busy it was."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, versions, and the load average of the last minute at the time of the call."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_average_1_minute": round(os.getloadavg()[0], 2),
    }


def store(path: Path | None, report: dict[str, Any]) -> None:
    """Write the report with its command where a path was given."""
    if path is None:
        return
    arguments = [path.name if arg == str(path) and path.is_absolute() else arg for arg in sys.argv[1:]]
    module = getattr(sys.modules["__main__"].__spec__, "name", Path(sys.argv[0]).name)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": " ".join(["python -m", module, *arguments]), **report}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
