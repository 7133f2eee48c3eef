"""The recovery with a fault at every call that any of its functions makes, and each function killed before and after.

    python -m benchmarks.recovery_faults --results benchmarks/results/recovery_faults.jsonl --minutes 60

The calls are those of a recorded run without faults, so that a new call is covered by itself. A case is one call of one
function and one fault; it must end recovered, or escalated with everything safe and recovered once the fault is cured.
Resumable: what the results file holds is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.recovery_story import Ending, Story
from benchmarks.recovery_world import RecoveryWorld, recovery_world
from local_stack.edge.call_faults import CallFault, CallSite, FaultKind

STORIES = {"approve": True, "reject": False}
OUTLIVES_CLIENT = 5
"""Calls in a row that fail: one more than an AWS client tries, so that the function fails and its state is retried."""
READ_FAULTS = (FaultKind.REFUSE, FaultKind.CUT, FaultKind.HANG, FaultKind.KILL_BEFORE)
"""Beside throttling. A read has no effect: to fail after it is to fail before it."""
_READS = ("Get", "List", "Describe", "Query", "Verify", "Generate", "get ")
_SEED = 20261129


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault in one story. function: folder name; times: calls in a row that it hits."""

    story: str
    function: str
    service: str
    operation: str
    occurrence: int
    kind: FaultKind
    times: int = 1

    @property
    def mutates(self) -> bool:
        """Whether the call changes anything."""
        return not self.operation.startswith(_READS)

    @property
    def key(self) -> str:
        """Names the case in the results."""
        call = f"{self.function} {self.service}.{self.operation}[{self.occurrence}]"
        return f"{self.story}: {call} {self.kind}x{self.times}"


def function_keys(world: RecoveryWorld) -> dict[str, str]:
    """Folder name of each function -> its access key."""
    return {name.split("-", 2)[2].replace("-", "_"): key for key, name in world.functions.items()}


def recorded(world: RecoveryWorld, story: str) -> list[Case]:
    """Every case of one story, from a run without faults."""
    ending = Story(world, f"clean-{story}", approve=STORIES[story]).tell()
    if ending.problems or ending.end != "recovered":
        raise RuntimeError(f"without any fault the story {story} ended as {ending}")
    print(
        f"{story}: {ending.seconds_to_cordon} s from the alarm to the cordon, "
        f"{ending.seconds_to_directive} s from the new node to the order to resume",
        flush=True,
    )
    return cases_of(world, story)


def cases_of(world: RecoveryWorld, story: str) -> list[Case]:
    """Every case of the story that has just been told without faults."""
    names = {key: folder for folder, key in function_keys(world).items()}
    cases: list[Case] = []
    for entry in world.last_calls:
        site = entry["site"]
        if site["access_key"] in names:
            for occurrence in range(entry["count"]):
                cases += _cases_of(story, names[site["access_key"]], site, occurrence)
    return cases


def _cases_of(story: str, function: str, site: dict[str, str], occurrence: int) -> Iterator[Case]:
    call = {
        "story": story,
        "function": function,
        "service": site["service"],
        "operation": site["operation"],
        "occurrence": occurrence,
    }
    for kind in FaultKind:
        once = Case(**call, kind=kind)  # type: ignore[arg-type]
        again_and_again = dataclasses.replace(once, times=OUTLIVES_CLIENT)
        if kind is FaultKind.THROTTLE or (kind is FaultKind.FAIL_BEFORE and once.mutates):
            yield again_and_again  # once, and the client tries again by itself
        elif kind is FaultKind.FAIL_AFTER and once.mutates:
            yield from (once, again_and_again)
        elif once.mutates or kind in READ_FAULTS:
            yield once


def run(world: RecoveryWorld, cases: Iterable[Case], name: str) -> Ending:
    """One story with the faults of all these cases set."""
    keys = function_keys(world)
    faults = []
    story = ""
    for case in cases:
        story = case.story
        site = CallSite(access_key=keys[case.function], service=case.service, operation=case.operation)
        faults.append(CallFault(kind=case.kind, site=site, occurrence=case.occurrence, times=case.times))
    return Story(world, name, approve=STORIES[story]).tell(faults)


def grouped(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases that one run can take: of one story, and at most one a function, so that no fault hides another."""
    waiting: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        waiting.setdefault((case.story, case.function), []).append(case)
    rows = [zip_longest(*(column for (of, _), column in waiting.items() if of == story)) for story in STORIES]
    for of_each_story in zip_longest(*rows):
        for row in of_each_story:
            if row is not None:
                yield [case for case in row if case is not None]


def main() -> int:
    """Run what is missing; 1 where any case broke a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after so long")
    parser.add_argument("--single", action="store_true", help="one fault a run, however long that takes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    began = time.monotonic()
    done = {row["case"]: row for row in _rows(arguments.results)}
    runs: deque[list[Case]] | None = None
    total = 0
    while runs is None or runs:
        with tempfile.TemporaryDirectory(prefix="recovery-faults-") as scratch, recovery_world(Path(scratch)) as world:
            if runs is None:
                everything = [case for story in STORIES for case in recorded(world, story)]
                random.Random(_SEED).shuffle(everything)  # noqa: S311 - an order, not a secret
                everything.sort(key=lambda case: not case.mutates)
                wanted = [case for case in everything if arguments.only in case.key and case.key not in done]
                total = len(everything)
                print(f"{total} cases, {len(done)} done, {len(wanted)} to run", flush=True)
                runs = deque([case] for case in wanted) if arguments.single else deque(grouped(wanted))
            stuck = False
            while runs and not stuck:
                if time.monotonic() - began > arguments.minutes * 60:
                    return _report(done, total)
                stuck = _carry_out(world, runs, done)
                _store(arguments.results, done)
    return _report(done, total)


def _carry_out(world: RecoveryWorld, runs: deque[list[Case]], done: dict[str, dict[str, Any]]) -> bool:
    """The next run. Where it breaks a rule, or a fault did not strike, each of its cases is run by itself later.

    Returns whether it left the world unusable.
    """
    together, started = runs.popleft(), time.monotonic()
    ending = run(world, together, f"job-{uuid.uuid4().hex[:8]}")
    seconds = round(time.monotonic() - started, 1)
    print(f"{seconds:5} s  {len(together)} faults: {ending.end} {ending.stopped_at} {ending.problems}", flush=True)
    for case, struck in zip(together, ending.struck, strict=True):
        if len(together) > 1 and (ending.problems or not struck):
            runs.append([case])
            continue
        row = {"struck": struck, "end": ending.end, "stopped_at": ending.stopped_at, "problems": ending.problems}
        print(f"         {case.key} {'' if struck else 'did not strike'}", flush=True)
        done[case.key] = {"case": case.key, **asdict(case), **row, "together_with": len(together) - 1}
        done[case.key] |= {"seconds": seconds}
    return ending.end == "stuck"


def _report(done: dict[str, dict[str, Any]], total: int) -> int:
    print(f"\n{len(done)} of {total} cases run")
    table = Counter((row["kind"], "broke a rule" if row["problems"] else row["end"]) for row in done.values())
    for (kind, end), count in sorted(table.items()):
        print(f"  {kind:12} {end:12} {count}")
    idle = [key for key, row in done.items() if not row["struck"]]
    if idle:
        print(f"{len(idle)} did not strike, because the run made that call fewer times: {', '.join(idle[:5])}")
    broken = {key: row["problems"] for key, row in done.items() if row["problems"]}
    for key, problems in broken.items():
        print(f"BROKEN  {key}: {problems}")
    return 1 if broken else 0


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _store(path: Path, done: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in done.values()))


if __name__ == "__main__":
    raise SystemExit(main())
