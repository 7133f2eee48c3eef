"""What `make demo` reads from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCENARIOS = ("default", "optimizer", "nan-hardware", "nan-numerics", "reject", "auto-replaced", "storm", "dry-run")


class DemoSettingsError(Exception):
    """A setting of the demo is wrong; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of one run of the demo."""

    approve_automatically: bool = False
    """``APPROVE=auto``: follow the approval link without waiting for a person."""
    scenario: str = "default"
    state_dir: Path = Path(".local/demo")
    """Emptied at the start."""
    nodes: int = 4
    steps: int = 60
    fault_step: int = 22
    """First training step in which the faulty node's matrix products are wrong."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> DemoSettings:
        """Raises `DemoSettingsError` for a value that is none."""
        approve = environ.get("APPROVE", "")
        if approve not in ("", "auto"):
            raise DemoSettingsError(
                f"APPROVE={approve} is unknown: use APPROVE=auto, or leave it out and open the link"
            )
        scenario = environ.get("SCENARIO", "") or "default"
        if scenario not in SCENARIOS:
            raise DemoSettingsError(f"SCENARIO={scenario} is unknown: choose one of {', '.join(SCENARIOS)}")
        state_dir = Path(environ.get("TRUESTEP_DEMO_STATE_DIR", "") or cls.state_dir)
        return cls(approve_automatically=approve == "auto", scenario=scenario, state_dir=state_dir.absolute())
