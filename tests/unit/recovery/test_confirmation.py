"""What running the failing computation again shows: who is named, who is cleared, and what shows nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lambdas.domain.confirmation import (
    bundle_of,
    cleared_by,
    conclude,
    finished,
    not_run,
    unfinished,
    wanted_anew,
)
from lambdas.domain.incident import Incident, open_incident
from lambdas.domain.policy import Policy
from lambdas.domain.records import Confirmation, ConfirmationStatus, ConfirmedNode, Escalation, Workload
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import DeviceReport, VerdictKind

BUNDLE = "s3://bundles/a1"
POLICY = Policy()


def an_incident(*ranks: int, kind: VerdictKind = VerdictKind.CONCLUSIVE, **changes: Any) -> Incident:
    alarm = replace(an_alarm(kind=kind, ranks=ranks or (2,)), evidence={"bundle_uri": BUNDLE})
    incident = open_incident(alarm, now=NOW, dry_run=False)
    return incident.evolve(**{"workload": Workload(pod={}, container={}), **changes})


def gpu(differing: int = 0, runs: int = 100, **changes: Any) -> DeviceReport:
    """Of the node that it is given to, unless it has a UUID: `a_row`'s GPU of that node."""
    fields: dict[str, Any] = {"device": "cuda:0", "gave": {"0": runs - differing}}
    return DeviceReport(**{**fields, "runs": runs, "differing": differing, **changes})


def node(
    name: str, *gpus: DeviceReport, suspect: bool = True, settled: bool = True, problem: str = ""
) -> ConfirmedNode:
    gpus = tuple(gpu if gpu.gpu_uuid else replace(gpu, gpu_uuid=f"GPU-{name[-8:]}") for gpu in gpus)
    return ConfirmedNode(
        node_name=name, job_name=f"j-{name}", suspect=suspect, ended=True, settled=settled, gpus=gpus, problem=problem
    )


def concluded(incident: Incident, *nodes: ConfirmedNode) -> Confirmation:
    return conclude(incident, Confirmation(status=ConfirmationStatus.RUNNING, reason="", nodes=nodes))


def healthy(*gpus: DeviceReport, **changes: Any) -> ConfirmedNode:
    return node("healthy", *(gpus or (gpu(),)), suspect=False, **changes)


def names(incident: Incident) -> tuple[str, ...]:
    return tuple(suspect.node_name for suspect in incident.suspects)


def test_a_suspect_that_differs_where_a_healthy_node_does_not_is_caught_with_its_hit_rate() -> None:
    incident = an_incident()
    (name,) = names(incident)
    found = concluded(incident, node(name, gpu(37, first="forward blocks.1"), gpu(device="cuda:1")), healthy())
    assert (found.status, found.named) == (ConfirmationStatus.REPRODUCED, "")
    assert found.hit_probability == pytest.approx(0.2818, abs=1e-4), "the lower end of 37 of 100's 95% interval"
    assert "37 of 100 runs (hit rate 37%, first at forward blocks.1)" in found.reason
    assert "healthy node healthy differs in 0 of 100 runs on 1 GPU" in found.reason
    assert cleared_by(incident, found) == ()


def test_the_hit_rate_is_that_of_the_accused_gpu() -> None:
    incident = an_incident()
    accused = incident.suspects[0].gpu_uuids[0]
    found = concluded(incident, node(names(incident)[0], gpu(90, gpu_uuid="GPU-x"), gpu(2, gpu_uuid=accused)))
    assert found.hit_probability == pytest.approx(0.0055, abs=1e-4)


@pytest.mark.parametrize(("runs", "margin"), [(1, 648), (3, 260), (20, 0), (1000, 0)])
def test_a_few_runs_that_all_differ_leave_a_margin_and_many_leave_none(runs: int, margin: int) -> None:
    incident = an_incident()
    found = concluded(incident, node(names(incident)[0], gpu(runs, runs=runs)), healthy())
    assert Policy(assumed_hit_probability=0.9).margin_steps(found.hit_probability) == margin


def test_no_difference_proves_nothing_and_says_so() -> None:
    found = concluded(an_incident(), node("n", gpu()), healthy())
    assert (found.status, found.hit_probability) == (ConfirmationStatus.NOT_REPRODUCED, None)
    assert "proves nothing" in found.reason


def test_a_healthy_node_that_differs_as_well_means_software() -> None:
    found = concluded(an_incident(), node("n", gpu(100)), healthy(gpu(1)))
    assert found.status is ConfirmationStatus.SOFTWARE
    assert found.hit_probability is None
    assert "That is software" in found.reason


def test_what_could_not_be_run_is_skipped_with_its_reason() -> None:
    found = concluded(an_incident(), node("n", problem="not scheduled: Insufficient nvidia.com/gpu"), healthy())
    assert found.status is ConfirmationStatus.SKIPPED
    assert "Insufficient nvidia.com/gpu" in found.reason
    no_run = concluded(an_incident(), node("n", gpu(runs=0, gave={}, problem="no module named model")))
    assert no_run.status is ConfirmationStatus.SKIPPED
    assert "no module named model" in no_run.reason


def test_memory_that_does_not_hold_the_weights_counts_without_a_differing_run() -> None:
    found = concluded(an_incident(), node("n", gpu(weights_differ=True)), healthy())
    assert (found.status, found.hit_probability) == (ConfirmationStatus.REPRODUCED, None)
    assert "does not hold the weights" in found.reason


def pair() -> Incident:
    return an_incident(1, 2, kind=VerdictKind.AMBIGUOUS)


def test_of_two_suspects_the_one_that_repeats_is_named_and_the_other_is_cleared() -> None:
    incident = pair()
    one, two = names(incident)
    found = concluded(incident, node(one, gpu()), node(two, gpu(5)), healthy())
    assert (found.status, found.named) == (ConfirmationStatus.REPRODUCED, two)
    assert [suspect.node_name for suspect in cleared_by(incident, found)] == [one]


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ((gpu(5),), (gpu(5),), ConfirmationStatus.UNSETTLED),
        ((gpu(),), (gpu(),), ConfirmationStatus.NOT_REPRODUCED),
        # Nothing clears who was not run, or not on every GPU.
        ((), (gpu(5),), ConfirmationStatus.UNSETTLED),
        ((gpu(), gpu(runs=0, problem="no such device")), (gpu(5),), ConfirmationStatus.UNSETTLED),
    ],
)
def test_otherwise_the_pair_stays_ambiguous(first: Any, second: Any, status: ConfirmationStatus) -> None:
    incident = pair()
    one, two = names(incident)
    found = concluded(incident, node(one, *first), node(two, *second), healthy())
    assert (found.status, found.named) == (status, "")
    assert cleared_by(incident, found) == ()


def test_a_suspect_whose_accused_gpu_was_not_among_those_that_ran_is_not_cleared() -> None:
    incident = pair()
    one, two = names(incident)
    spared = node(one, gpu(gpu_uuid="GPU-other"))
    found = concluded(incident, spared, node(two, gpu(5)), healthy())
    assert (found.status, found.named) == (ConfirmationStatus.UNSETTLED, "")
    assert "but accused GPU GPU-00000001 was not among those that ran" in found.reason
    assert cleared_by(incident, found) == ()


def test_a_suspect_is_not_named_by_a_gpu_that_nobody_accused_while_the_accused_one_did_not_run() -> None:
    incident = pair()
    one, two = names(incident)
    found = concluded(incident, node(one, gpu()), node(two, gpu(90, gpu_uuid="GPU-other")), healthy())
    assert (found.status, found.named, found.hit_probability) == (ConfirmationStatus.UNSETTLED, "", None)
    assert "GPU-other in 90 of 100 runs" in found.reason
    assert "accused GPU GPU-00000002 was not among those that ran" in found.reason
    alone = an_incident()
    found = concluded(alone, node(names(alone)[0], gpu(90, gpu_uuid="GPU-other")), healthy())
    assert (found.status, found.hit_probability) == (ConfirmationStatus.UNSETTLED, None)


def test_where_no_accused_gpu_ran_nothing_was_run_again() -> None:
    alone = an_incident()
    found = concluded(alone, node(names(alone)[0], gpu(gpu_uuid="GPU-other")), healthy())
    assert found.status is ConfirmationStatus.SKIPPED
    assert "GPU-00000002 was not among those that ran" in found.reason
    # A GPU that reported, and ran nothing, has not run either.
    idle = node(names(alone)[0], gpu(runs=0, gave={}, problem="no such device"), gpu(gpu_uuid="GPU-other"))
    assert concluded(alone, idle, healthy()).status is ConfirmationStatus.SKIPPED


def unsettled(name: str, gave: dict[str, int], differing: int = 0, *, suspect: bool = True) -> ConfirmedNode:
    return node(name, gpu(differing, gave=gave), suspect=suspect, settled=False)


def test_where_the_audit_settled_nothing_the_healthy_node_says_whose_result_is_right() -> None:
    incident = pair()
    one, two = names(incident)
    found = concluded(
        incident,
        # Each repeats what it recorded in the audit, which differs: neither contradicts itself.
        unsettled(one, {"0": 100}),
        unsettled(two, {"1": 100}),
        unsettled("healthy", {"0": 100}, suspect=False),
    )
    assert (found.status, found.named) == (ConfirmationStatus.REPRODUCED, two)
    assert found.hit_probability == pytest.approx(0.9630, abs=1e-4)


def test_without_a_healthy_node_two_that_repeat_themselves_stay_two() -> None:
    incident = pair()
    one, two = names(incident)
    found = concluded(incident, unsettled(one, {"0": 100}), unsettled(two, {"1": 100}))
    assert found.status is ConfirmationStatus.NOT_REPRODUCED
    assert "nothing says whose is right" in found.reason
    # One that does not even repeat itself needs no referee.
    found = concluded(incident, unsettled(one, {"0": 100}), unsettled(two, {"1": 60}, differing=40))
    assert found.named == two


def test_a_healthy_node_that_does_not_repeat_itself_is_no_referee() -> None:
    one, two = names(pair())
    found = concluded(
        pair(),
        unsettled(one, {"0": 100}),
        unsettled(two, {"1": 100}),
        unsettled("healthy", {"0": 90}, differing=10, suspect=False),
    )
    assert found.status is ConfirmationStatus.SOFTWARE


def test_the_comparison_is_waited_for_only_while_a_suspect_has_something_to_compare() -> None:
    running = replace(healthy(), ended=False, gpus=())
    assert not finished([node("n", gpu()), running])
    assert finished([node("n", problem="not scheduled"), running])
    assert not finished([replace(node("n"), ended=False), healthy()])
    assert finished([node("n", gpu()), healthy()])


def test_why_it_is_not_run_is_always_a_sentence() -> None:
    assert not_run(an_incident(), POLICY) == ""
    no_bundle = replace(an_alarm(), evidence={"bundle_missing": "this run keeps no bundles"})
    assert "this run keeps no bundles" in not_run(an_incident(alarm=no_bundle), POLICY)
    assert "no evidence bundle" in not_run(an_incident(alarm=an_alarm()), POLICY)
    for incident, policy in (
        (an_incident(workload=None), POLICY),
        (an_incident(workload=Workload(pod={}, container={}, refused="no Job can be made of it")), POLICY),
        (an_incident(), Policy(confirm_runs=0)),
        (an_incident(dry_run=True), POLICY),
        (an_incident(1, 2, 3, 4, 5, kind=VerdictKind.AMBIGUOUS), POLICY),
    ):
        assert f"`truestep confirm {BUNDLE}`" in not_run(incident, policy)
    gone = an_incident()
    gone = gone.evolve(suspects=tuple(replace(suspect, present=False) for suspect in gone.suspects))
    assert "in the cluster any more" in not_run(gone, POLICY)


def test_a_person_who_goes_on_from_here_gets_a_new_run_once() -> None:
    def resumed(at: str) -> Incident:
        stop = Escalation(failed_state="RequestApproval", error="", cause="", at=at, resume_from="ConfirmSuspect")
        known = Confirmation(status=ConfirmationStatus.SKIPPED, reason="", at="2026-03-01T02:00:00.000Z")
        return an_incident(confirmation=known, escalation=stop)

    assert wanted_anew(resumed("2026-03-01T03:00:00.000Z"))
    assert not wanted_anew(resumed("2026-03-01T01:00:00.000Z"))
    assert not wanted_anew(an_incident())


LATE = {"bundle_failed": "not written within 60 s; it may be complete later"}


def sent_with(evidence: dict[str, Any]) -> Incident:
    return an_incident(alarm=replace(an_alarm(), evidence=evidence))


def test_a_bundle_that_is_not_finished_is_looked_for_where_the_alarm_expects_it() -> None:
    elsewhere = "s3://evidence/run-1/bundles/a"
    incident = sent_with({**LATE, "bundle_expected": elsewhere})
    assert (bundle_of(incident), not_run(incident, POLICY)) == (elsewhere, "")
    assert "not written within 60 s" in unfinished(incident)


def test_a_bundle_that_will_not_come_is_neither_looked_for_nor_waited_for() -> None:
    incident = sent_with({"bundle_failed": "StorageError: read-only file system", "bundle_expected": ""})
    assert (bundle_of(incident), unfinished(incident)) == ("", "")
    said = "the alarm carries no evidence bundle to run again: StorageError: read-only file system"
    assert not_run(incident, POLICY) == said


def test_what_the_alarm_says_comes_first_and_what_never_was_is_not_looked_for() -> None:
    assert bundle_of(sent_with({**LATE, "bundle_uri": BUNDLE})) == BUNDLE
    for evidence in ({}, {"bundle_missing": "bundles=None"}, {"bundle_expected": ["s3://b/bundles/a"]}, LATE):
        incident = sent_with(evidence)
        assert (bundle_of(incident), unfinished(incident)) == ("", "")
    assert "not written within 60 s" in not_run(sent_with(LATE), POLICY)


LACKING = Workload(pod={}, container={}, left_out=("PYTHONPATH: its value is in a Secret",))
LEFT_OUT = "; left out of the Job: PYTHONPATH: its value is in a Secret"


def test_what_the_job_went_without_is_told_where_it_could_not_run() -> None:
    found = concluded(an_incident(workload=LACKING), node("n", problem="No module named 'model'"), healthy())
    assert "No module named 'model'" in found.reason
    assert found.reason.endswith(LEFT_OUT)


@pytest.mark.parametrize(("differing", "beside"), [(0, 0), (3, 3), (3, 0)])
def test_what_the_job_went_without_is_told_unless_the_suspect_alone_differs(differing: int, beside: int) -> None:
    incident = an_incident(workload=LACKING)
    (name,) = names(incident)
    found = concluded(incident, node(name, gpu(differing)), healthy(gpu(beside)))
    assert found.reason.endswith(LEFT_OUT) == (found.status is not ConfirmationStatus.REPRODUCED)
    statuses = {(0, 0): "not_reproduced", (3, 3): "software", (3, 0): "reproduced"}
    assert found.status == statuses[differing, beside]


def test_a_bundle_that_never_came_is_told_with_the_alarms_own_reason() -> None:
    late = {**LATE, "bundle_expected": BUNDLE}
    found = concluded(sent_with(late), node("n", problem="s3://... has no bundle.json after 120 s"), healthy())
    assert found.status is ConfirmationStatus.SKIPPED
    assert "has no bundle.json after 120 s; the alarm went out without it: not written within 60 s" in found.reason
