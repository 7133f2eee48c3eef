"""The alarm storm: every rank of a large job reports the same fault, again and again, and one incident comes of it."""

from __future__ import annotations

from benchmarks.recovery_storm import StormResult, alarm_storm
from benchmarks.recovery_world import recovery_world
from demo.settings import DemoSettings
from demo.stage import StoryError
from demo.view import View
from truestep.contract.words import counted

ALARMS, RANKS = 2000, 16_384
"""Alarms sent over the bus here; `benchmarks.recovery_storm` sends 100,000."""


def tell_storm(settings: DemoSettings, view: View) -> int:
    """Run it. Returns the exit code: 0 if every claim holds."""
    with recovery_world(settings.state_dir / "storm") as world:
        view.line("a job whose pods wait, and the recovery, deployed from the synthesised template")
        view.chapter("2  The storm")
        view.line(f"{ALARMS} alarms of one fault, as from {RANKS} ranks, over the event bus")
        result = alarm_storm(world, alarms=ALARMS, ranks=RANKS, tell=view.line)
    view.chapter("3  Proof")
    claims = _claims(result)
    view.proofs(claims)
    failed = [claim for claim, _, holds in claims if not holds]
    if failed:
        raise StoryError("these claims do not hold: " + "; ".join(failed))
    view.line("every claim holds", style="bold green")
    return 0


def _claims(result: StormResult) -> list[tuple[str, str, bool]]:
    calls = result.intake_calls
    return [
        (
            "one incident",
            f"{counted(result.incidents, 'incident')}, {counted(result.executions, 'execution')}",
            result.one_incident,
        ),
        ("people are asked once", counted(result.questions, "message"), result.questions == 1),
        ("the calls do not grow with the alarms", f"{calls} calls for {result.alarms} alarms", result.bounded),
        (
            "the node is replaced once, and the job resumes",
            ", ".join(result.problems) or "recovered",
            not result.problems,
        ),
    ]
