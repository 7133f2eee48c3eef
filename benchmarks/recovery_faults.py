"""The recovery with a fault at every call that any of its functions makes, and each function killed before and after.

    python -m benchmarks.recovery_faults --results benchmarks/results/recovery_faults.jsonl --minutes 60

The calls are those of a recorded run without faults, so that a new call is covered by itself. A case is one call of one
function and one fault, alone in its run; it must end recovered, or escalated with everything safe and recovered once
the fault is cured. Resumable: what the results file holds is not run again. Most of a run is waiting, so that several
deployments beside one another (`--worlds`) take little more than one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import tempfile
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery_story import Ending, Story
from benchmarks.recovery_world import FUNCTION_SECONDS, RecoveryWorld, recovery_world
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
        if case.service == "eks":
            _forget_instances(world, world.functions[keys[case.function]])
        site = CallSite(access_key=keys[case.function], service=case.service, operation=case.operation)
        faults.append(CallFault(kind=case.kind, site=site, occurrence=case.occurrence, times=case.times))
    return Story(world, name, approve=STORIES[story]).tell(faults)


def _forget_instances(world: RecoveryWorld, name: str) -> None:
    """Let the function's next call find no warm instance: only a cold one asks for its cluster's address."""
    functions = [one for one in world.stack.deployment.functions if one.name == name]
    cold = [dataclasses.replace(one, timeout_seconds=FUNCTION_SECONDS).to_json() for one in functions]
    world.stack.configure_edge({"functions": cold})


class Matrix:
    """The cases that wait and those that have run. Any number of threads."""

    def __init__(self, results: Path, *, until: float) -> None:
        """until: time of the monotonic clock after which no run is started."""
        self.done = {row["case"]: row for row in _rows(results)}
        self.waiting: deque[Case] = deque()
        self._results = results
        self._until = until
        self._lock = threading.Lock()

    def go_on(self) -> None:
        """Run cases in a deployment of one's own until none waits; a new one after each that was left unusable."""
        case = self._take()
        while case is not None:
            with (
                tempfile.TemporaryDirectory(prefix="recovery-faults-") as scratch,
                recovery_world(Path(scratch)) as world,
            ):
                usable = True
                while usable and case is not None:
                    usable = self._run(world, case)
                    case = self._take()

    def _take(self) -> Case | None:
        with self._lock:
            return self.waiting.popleft() if self.waiting and time.monotonic() < self._until else None

    def _run(self, world: RecoveryWorld, case: Case) -> bool:
        """Run the case and keep its result. Returns whether the world can be used again."""
        started = time.monotonic()
        ending = run(world, [case], f"job-{uuid.uuid4().hex[:8]}")
        row = {"struck": ending.struck[0], "end": ending.end, "stopped_at": ending.stopped_at}
        row |= {"problems": ending.problems, "seconds": round(time.monotonic() - started, 1)}
        with self._lock:
            self.done[case.key] = {"case": case.key, **asdict(case), **row}
            rows = [json.dumps(self.done[key], sort_keys=True) for key in sorted(self.done)]
            self._results.parent.mkdir(parents=True, exist_ok=True)
            self._results.write_text("\n".join(rows) + "\n")
            print(f"{row['seconds']:5} s  {case.key}: {ending.end} {ending.stopped_at} {ending.problems}", flush=True)
        return ending.end != "stuck"


def main() -> int:
    """Run what is missing; 1 where any case broke a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after so long")
    parser.add_argument("--worlds", type=int, default=2, help="deployments beside one another; each takes about 1 GB")
    parser.add_argument("--only", default="", help="cases whose name this regular expression is found in")
    arguments = parser.parse_args()
    matrix = Matrix(arguments.results, until=time.monotonic() + arguments.minutes * 60)
    with tempfile.TemporaryDirectory(prefix="recovery-faults-") as scratch, recovery_world(Path(scratch)) as world:
        everything = [case for story in STORIES for case in recorded(world, story)]
    random.Random(_SEED).shuffle(everything)  # noqa: S311 - an order, not a secret
    everything.sort(key=lambda case: not case.mutates)
    wanted = [case for case in everything if re.search(arguments.only, case.key) and case.key not in matrix.done]
    print(f"{len(everything)} cases, {len(matrix.done)} done, {len(wanted)} to run", flush=True)
    matrix.waiting.extend(wanted)
    with ThreadPoolExecutor(arguments.worlds) as pool:
        for worker in [pool.submit(matrix.go_on) for _ in range(arguments.worlds)]:
            worker.result()
    return _report(matrix.done, {case.key for case in everything})


def _report(done: Mapping[str, Mapping[str, Any]], known: set[str]) -> int:
    """Print how the cases ended. known: names of the cases of today's functions; no other counts."""
    rows = [row for key, row in done.items() if key in known]
    print(f"\n{len(rows)} of {len(known)} cases run, as recovered + escalated:\n")
    print("\n".join(summary(rows)))
    idle = [row["case"] for row in rows if not row["struck"]]
    if idle:
        print(f"\n{len(idle)} did not strike, because the run made that call fewer times: {', '.join(idle)}")
    broken = {row["case"]: row["problems"] for row in rows if row["problems"]}
    for key, problems in broken.items():
        print(f"BROKEN  {key}: {problems}")
    return 1 if broken else 0


def summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of a table in Markdown: functions down, faults across, each cell how many recovered + escalated."""
    ends = Counter((row["function"], row["kind"], row["end"]) for row in rows if row["struck"] and not row["problems"])
    kinds = [kind.value for kind in FaultKind]

    def cell(functions: Iterable[str], kind: str) -> str:
        return " + ".join(str(sum(ends[one, kind, end] for one in functions)) for end in ("recovered", "escalated"))

    functions = sorted({function for function, _, _ in ends})
    lines = [f"| function | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    lines += [f"| `{one}` | {' | '.join(cell([one], kind) for kind in kinds)} |" for one in functions]
    return [*lines, f"| all | {' | '.join(cell(functions, kind) for kind in kinds)} |"]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
