"""The deployed recovery, real handlers and all: every kind of job, and faults at the calls that a run makes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.recovery_faults import STORIES, Case, cases_of, run
from benchmarks.recovery_jobs import KINDS, JobShape
from benchmarks.recovery_story import Story
from benchmarks.recovery_world import REPOSITORY, RecoveryWorld, recovery_world
from local_stack.edge.call_faults import FaultKind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SHAPES = [JobShape(kind=kind, queue=queue) for kind in KINDS for queue in ("", "team")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecoveryWorld]:
    if not (REPOSITORY / "build" / "layer-host" / "python").is_dir():
        pytest.skip("the functions' dependencies are not installed: python -m infra.wheelhouse")
    with recovery_world(tmp_path_factory.mktemp("recovery")) as running:
        yield running


@pytest.fixture(scope="module")
def cases(world: RecoveryWorld) -> list[Case]:
    """Every case of both stories, from a run of each without faults."""
    found: list[Case] = []
    for story, approve in STORIES.items():
        ending = Story(world, f"clean-{story}", approve=approve).tell()
        assert (ending.end, ending.problems) == ("recovered", [])
        found += cases_of(world, story)
    made = {(case.function, case.operation) for case in found}
    assert made >= {("confirm_suspect", "post jobs"), ("start_health_check", "delete jobs")}
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.kind}{'-queued' if shape.queue else ''}")
def test_a_job_of_this_kind_is_stopped_and_resumed_elsewhere(world: RecoveryWorld, shape: JobShape) -> None:
    kind, queue = shape.kind, shape.queue
    seen = len(world.stack.kubernetes_requests())
    # A job of a queue is given back to the same node: what differs is how it is stopped and started.
    ending = Story(world, f"{kind.lower()}{'-queued' if queue else ''}", approve=not queue, shape=shape).tell()
    assert (ending.end, ending.problems) == ("recovered", [])
    asked = world.stack.kubernetes_requests()[seen:]
    patched = {row["resource"] for row in asked if row["verb"] == "patch" and ":role/" in row["user"]}
    assert patched - {"nodes", "configmaps"} == {"workloads" if queue else KINDS[kind].plural}


def test_a_change_whose_answer_is_lost_is_made_once(world: RecoveryWorld, cases: list[Case]) -> None:
    """All of them in one run of each story: a lost answer costs one more try, so that none hides another."""
    lost = [case for case in cases if case.kind is FaultKind.FAIL_AFTER and case.times == 1]
    assert {case.service for case in lost} >= {"dynamodb", "kubernetes", "sagemaker", "s3", "sns", "states"}
    for story in STORIES:
        together = [case for case in lost if case.story == story]
        ending = run(world, together, f"lost-{story}")
        assert (ending.end, ending.problems) == ("recovered", [])
        missed = [case.key for case, hits in zip(together, ending.struck, strict=True) if not hits]
        # A state that is tried again finds some of its work done.
        assert len(missed) <= 2, missed
    print(f"{len(lost)} changes whose answer was lost")


def test_whatever_fails_it_recovers_or_stops_safely(world: RecoveryWorld, cases: list[Case]) -> None:
    """One fault of each function in one run, a seeded sample; `benchmarks.recovery_faults` has them all, one a run."""
    sample = random.Random(20261129).sample(cases, len(cases))  # noqa: S311 - an order, not a secret
    quick = [case for case in sample if case.kind is not FaultKind.HANG and case.story == "approve"]
    together = list({case.function: case for case in quick}.values())
    ending = run(world, together, "sampled")
    assert ending.problems == [], [case.key for case in together]
    print(f"{len(together)} of {len(cases)} cases, in one run")
