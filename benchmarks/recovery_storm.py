"""Storms: 100,000 alarms of one fault from 16,384 ranks make one incident; 50 incidents at once all end right.

    python -m benchmarks.recovery_storm --results benchmarks/results/recovery_storm.json

The alarms of the large storm are handed to intake's handler in this process, against the deployment's services: what is
counted are the calls that it makes. `alarm_storm` sends them over the event bus.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery_jobs import JobShape
from benchmarks.recovery_story import Story
from benchmarks.recovery_world import NAMESPACE, Alarmed, RecoveryWorld, recovery_world
from local_stack.access_keys import SECRET_ACCESS_KEY
from truestep.contract import training_source

STEPS = 6
"""Steps at which the fault is reported: as many different alarms."""
_ENTRIES = 10
"""Entries that one PutEvents takes."""


@dataclass(frozen=True, kw_only=True)
class StormResult:
    """What became of a storm."""

    alarms: int
    seconds: float
    incidents: int
    executions: int
    questions: int
    intake_calls: int
    """AWS calls that intake's function made for all the alarms."""
    calls_by_operation: Mapping[str, int]
    instances: int
    problems: list[str]

    @property
    def one_incident(self) -> bool:
        """Whether all alarms became one incident with one execution."""
        return (self.incidents, self.executions) == (1, 1)

    @property
    def bounded(self) -> bool:
        """At most 10 calls for each different alarm and each instance of intake."""
        return self.intake_calls <= 10 * STEPS * self.instances


def alarm_storm(
    world: RecoveryWorld, *, alarms: int, ranks: int, tell: Callable[[str], object] = print, directly: bool = False
) -> StormResult:
    """Send the alarms, then see the incident through. directly: to intake's handler, in this process."""
    story = Story(world, "storm", approve=True)
    alarmed = world.alarm(story.job)
    alarmed["run"] |= {"world_size": ranks}
    different = [alarmed | {"alarm_id": uuid.uuid4().hex, "step": 44 + step} for step in range(STEPS)]
    world.stack.set_call_faults([])
    started = time.monotonic()
    deliver = _deliver_directly if directly else _deliver_over_the_bus
    deliver(world, different, alarms)
    seconds = time.monotonic() - started
    tell(f"{alarms} alarms delivered in {seconds:.0f} s")
    ending = story.go_on(Alarmed(job=story.job, alarm=different[0]))
    calls = {
        f"{entry['site']['service']}.{entry['site']['operation']}": entry["count"]
        for entry in world.last_calls
        if world.functions.get(entry["site"]["access_key"], "").endswith("receive-alarm")
    }
    table = world.stack.client("dynamodb").scan(TableName=world.stack.outputs["TableName"])["Items"]
    incidents = [item for item in table if item["PK"]["S"].startswith("INCIDENT#")]
    return StormResult(
        alarms=alarms,
        seconds=round(seconds, 1),
        incidents=len(incidents),
        executions=len(world.stack.executions()),
        questions=sum("Approve" in subject for subject in world.subjects(ending.incident_id)),
        intake_calls=sum(calls.values()),
        calls_by_operation=calls,
        instances=1 if directly else 3,
        problems=ending.problems,
    )


def _deliver_over_the_bus(world: RecoveryWorld, different: list[dict[str, Any]], alarms: int) -> None:
    events = world.stack.client("events")
    entries = [
        {
            "Source": training_source(world.cluster_arn, NAMESPACE),
            "DetailType": "Training Corruption Alarm",
            "Detail": json.dumps(different[number % len(different)]),
            "EventBusName": world.stack.outputs["EventBusName"],
        }
        for number in range(alarms)
    ]
    batches = [entries[at : at + _ENTRIES] for at in range(0, alarms, _ENTRIES)]
    with ThreadPoolExecutor(4) as pool:
        assert not any(
            answer["FailedEntryCount"] for answer in pool.map(lambda one: events.put_events(Entries=one), batches)
        )


def _deliver_directly(world: RecoveryWorld, different: list[dict[str, Any]], alarms: int) -> None:
    (function,) = [one for one in world.stack.deployment.functions if one.name.endswith("receive-alarm")]
    variables = {
        **function.environment,
        "AWS_ENDPOINT_URL": world.stack.endpoint_url,
        "AWS_REGION": world.stack.region,
        "AWS_ACCESS_KEY_ID": function.access_key,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "POWERTOOLS_TRACE_DISABLED": "true",
        "POWERTOOLS_LOG_LEVEL": "CRITICAL",
    }
    with ExitStack() as stack, _environment(variables):
        from lambdas.receive_alarm.handler import handler

        # Its metrics are lines on standard output.
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        source = training_source(world.cluster_arn, NAMESPACE)
        for number in range(alarms):
            detail = different[number % len(different)]
            handler({"source": source, "detail-type": "Training Corruption Alarm", "detail": detail}, None)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def many_at_once(world: RecoveryWorld, incidents: int) -> list[str]:
    """As many incidents on different jobs at the same time; what broke a rule."""
    stories = [
        Story(world, f"many-{number}", approve=True, shape=JobShape(pods=1), alone=False) for number in range(incidents)
    ]
    with ThreadPoolExecutor(incidents) as pool:
        endings = list(pool.map(lambda story: story.tell(), stories))
    return [f"{ending.incident_id}: {problem}" for ending in endings for problem in ending.problems]


def main() -> int:
    """Both; 1 where a rule was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alarms", type=int, default=100_000, help="of one fault; 0: no storm")
    parser.add_argument("--incidents", type=int, default=50, help="at once; 0: none")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {}
    right = True
    with tempfile.TemporaryDirectory(prefix="recovery-storm-") as scratch:
        if arguments.alarms:
            with recovery_world(Path(scratch) / "storm") as world:
                storm = alarm_storm(world, alarms=arguments.alarms, ranks=16_384, directly=True)
            document["storm"] = asdict(storm)
            right = storm.one_incident and storm.bounded and not storm.problems
            print(json.dumps(document["storm"]), flush=True)
        if arguments.incidents:
            document["at_once"] = _at_once(Path(scratch) / "many", arguments.incidents)
            right = right and not document["at_once"]["problems"]
            print(json.dumps(document["at_once"]), flush=True)
    if arguments.results:
        arguments.results.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if right else 1


def _at_once(directory: Path, incidents: int) -> dict[str, Any]:
    policy = {"max_quarantined_nodes": 64, "max_quarantined_percent": 100.0}
    with recovery_world(directory, nodes=incidents + 1, **policy) as world:
        started = time.monotonic()
        problems = many_at_once(world, incidents)
        seconds = round(time.monotonic() - started, 1)
    return {"incidents": incidents, "seconds": seconds, "problems": problems}


if __name__ == "__main__":
    raise SystemExit(main())
