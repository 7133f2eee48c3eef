"""What both examples take on their command line, and what they do at the end."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import truestep


def arguments_of(description: str) -> argparse.Namespace:
    """Parse the command line; the node's name is the rank's where nothing says it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="where checkpoints go: s3://bucket/prefix or file:///directory")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--fault-step", type=int, help="rank 1 computes wrongly from this step on")
    parser.add_argument("--result", type=Path, help="write what came out here, and do not hold after an alarm")
    os.environ.setdefault("NODE_NAME", f"node-{os.environ['RANK']}")  # on a cluster: spec.nodeName
    return parser.parse_args()


def conclude(outcome: Mapping[str, Any], result: Path | None) -> None:
    """Hold after an alarm; or write what came out, on the first rank."""
    alarm = outcome["alarm"]
    if result is None:
        if alarm:
            truestep.report_sdc(alarm)
    elif os.environ["RANK"] == "0":
        seen = {"alarm_step": alarm.step, "suspects": list(alarm.suspect_ranks)} if alarm else {"alarm_step": None}
        result.write_text(json.dumps({**outcome, "alarm": None, **seen}))
