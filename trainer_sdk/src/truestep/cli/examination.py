"""``truestep doctor``: whether audits of a script can work."""

from __future__ import annotations

import sys
from pathlib import Path

from truestep.cli import FINDING, FINE
from truestep.cli.output import print_json, say, working
from truestep.cli.tensors import require_torch
from truestep.contract.words import counted

_STYLES = {"note": "dim", "suspect": "bold yellow", "loss only": "bold yellow", "refused": "bold red"}


def show_examination(script: str, *, processes: int, timeout_seconds: float, as_json: bool) -> int:
    """Print what was found. Returns the exit code: a note is fine, everything else a finding. Raises `ScriptError`."""
    require_torch("truestep doctor")
    # As python -m does: the script lies where the command is given.
    sys.path.insert(0, str(Path.cwd()))
    from truestep.doctor.diagnosis import Level
    from truestep.doctor.processes import examine_script

    with working(
        f"examining {script} in {counted(processes, 'process', 'processes')}, {timeout_seconds:.0f} s at most"
    ):
        diagnosis = examine_script(script, processes, timeout_seconds)
    findings = [o for o in diagnosis.observations if o.level is not Level.NOTE]
    refused = bool(diagnosis.at(Level.REFUSED))
    coverage = "nothing" if refused else diagnosis.coverage
    if as_json:
        print_json({"script": script, "coverage": coverage, "observations": diagnosis.observations})
    else:
        for observation in diagnosis.observations:
            style = _STYLES.get(observation.level, "")
            say(f"{observation.subject} ({observation.level})", style=style)
            say(f"  {observation.message}")
        say(f"audits cover {coverage}" if findings else f"nothing found: audits cover {coverage}")
    return FINDING if findings else FINE
