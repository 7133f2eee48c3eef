"""Intake, advice, approval, escalation and verification as decisions."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from lambdas.domain.approval import asked, decided, decision_refused, settled
from lambdas.domain.errors import AlarmRefusedError
from lambdas.domain.incident import Incident, IncidentStatus, open_incident
from lambdas.domain.intake import ACCUSING, IntakeAction, check_rows, check_run, check_source, decide_intake
from lambdas.domain.messages import accuses_nobody
from lambdas.domain.outcome import Outcome
from lambdas.domain.policy import Policy
from lambdas.domain.recommendation import NO_ADVICE, REPLACE, recommend
from lambdas.domain.records import (
    Confirmation,
    ConfirmationStatus,
    HealthCheck,
    HealthCheckStatus,
    PastIncident,
)
from lambdas.domain.workflow import (
    escalated,
)
from tests.unit.recovery.alarms import NOW, a_row, an_alarm
from truestep.contract import CheckpointRef, Step, VerdictKind

POLICY = Policy()
ORDERED = CheckpointRef(uri="s3://checkpoints/run-1/step-00000099", step=Step(99), manifest_sha256="ab" * 32)


def an_incident(**run: object) -> Incident:
    return open_incident(an_alarm(**run), now=NOW, dry_run=False)


def a_past(kind: VerdictKind) -> PastIncident:
    return PastIncident(
        incident_id="inc-old", gpu_uuid="GPU-00000002", node_name="n", verdict_kind=str(kind), at="2026-01-01T00:00:00Z"
    )


# --- intake


@pytest.mark.parametrize("kind", [VerdictKind.NUMERICS, VerdictKind.NONDETERMINISTIC, VerdictKind.INPUTS])
def test_verdicts_that_accuse_nobody_only_notify_even_with_an_incident_open(kind: VerdictKind) -> None:
    assert decide_intake(an_alarm(kind=kind), an_incident()).action is IntakeAction.NOTIFY


@pytest.mark.parametrize("kind", [VerdictKind.CONCLUSIVE, VerdictKind.AMBIGUOUS])
def test_an_accusing_verdict_opens_or_joins(kind: VerdictKind) -> None:
    assert decide_intake(an_alarm(kind=kind), None).action is IntakeAction.OPEN
    assert decide_intake(an_alarm(kind=kind, step=150), an_incident()).action is IntakeAction.JOIN


@pytest.mark.parametrize("kind", [kind for kind in VerdictKind if kind not in ACCUSING])
def test_a_message_without_an_accusation_says_what_to_do_and_how_to_start_again(kind: VerdictKind) -> None:
    text = accuses_nobody(an_alarm(kind=kind)).text
    assert "What to do: " in text
    assert "remove s3://checkpoints/run-1/tombstone.json" in text


OWN_SOURCE = "truestep.training.abcdefghijkl.team-a"


@pytest.mark.parametrize(
    "source",
    [
        "truestep.training",
        "truestep.training.team-a",
        "truestep.training.abcdefghijkl.team-b",
        "truestep.training.lkjihgfedcba.team-a",
        f"{OWN_SOURCE}.more",
        f"{OWN_SOURCE} ",
        "truestep.recovery",
        "None",
    ],
)
def test_a_source_speaks_for_its_own_cluster_and_namespace_alone(source: str) -> None:
    run = an_alarm().run
    check_source(OWN_SOURCE, run, ("team-b", "team-a"))
    with pytest.raises(AlarmRefusedError, match=f"only '{OWN_SOURCE}' may: .*attach to the pods' role") as caught:
        check_source(source, run, ("team-b", "team-a"))
    assert repr(source) in str(caught.value)


def test_a_namespace_that_is_not_served_is_refused_by_name_whatever_the_source() -> None:
    with pytest.raises(AlarmRefusedError, match=r"'team-a' is not among training_namespaces of .*\(team-b\): add it"):
        check_source(OWN_SOURCE, an_alarm().run, ("team-b",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job_name", ""),
        ("job_name", "pretrain#CLAIM"),
        ("namespace", "../kube-system"),
        ("job_kind", "Job#x"),
        ("cluster_arn", "arn:aws:sagemaker:us-east-1:123456789012:cluster/a#b"),
    ],
)
def test_a_run_without_a_valid_job_says_which_field_and_which_variables_to_set(field: str, value: str) -> None:
    check_run(an_alarm().run)
    with pytest.raises(AlarmRefusedError, match=rf"{field}: set .*TRUESTEP_JOB_NAME"):
        check_run(an_alarm(**{field: value}).run)


@pytest.mark.parametrize(
    "changes",
    [
        {"node_name": "../../../apis/batch/v1/namespaces/team-b/jobs/x"},
        {"node_name": ""},
        {"node_name": "hyperpod-i-1\n"},
        {"node_name": "a..b"},
        {"pod_name": "../namespaces/team-b/pods/p?x="},
        {"namespace": "kube-system"},
    ],
)
@pytest.mark.parametrize("rows", ["suspects", "witnesses"])
def test_a_row_that_would_address_something_else_than_the_jobs_own_nodes_and_pods_is_refused(
    rows: str, changes: dict[str, str]
) -> None:
    row = a_row(2)
    for fine in (row, replace(row, namespace="team-a"), replace(row, node_name="ip-10-0-0-1.eu.internal", pod_name="")):
        check_rows(replace(an_alarm(), suspects=(fine,)))
    with pytest.raises(AlarmRefusedError, match="rank 2"):
        check_rows(replace(an_alarm(), **{rows: (replace(row, **changes),)}))


# --- advice


def test_a_first_incident_carries_no_advice_and_an_open_cause() -> None:
    advice = recommend(an_incident())
    assert (advice.action, advice.cause) == (NO_ADVICE, "open")


def test_the_same_gpu_caught_again_is_hardware_and_to_be_replaced() -> None:
    again = an_incident().evolve(history=(a_past(VerdictKind.CONCLUSIVE),))
    assert (recommend(again).action, recommend(again).cause) == (REPLACE, "hardware")
    assert "inc-old" in recommend(again).reason
    reproduced = Confirmation(status=ConfirmationStatus.REPRODUCED, reason="3 of 1000 runs differed")
    assert recommend(an_incident().evolve(confirmation=reproduced)).cause == "hardware"


def test_having_been_one_of_several_candidates_is_not_held_against_a_gpu() -> None:
    assert recommend(an_incident().evolve(history=(a_past(VerdictKind.AMBIGUOUS),))).action == NO_ADVICE


@pytest.mark.parametrize("what", ["rejected", "linked"])
def test_a_rejected_accusation_and_the_one_that_led_here_are_no_proof_of_hardware(what: str) -> None:
    past = replace(a_past(VerdictKind.CONCLUSIVE), **{what: True})
    advice = recommend(an_incident().evolve(history=(past,)))
    assert (advice.action, advice.cause) == (NO_ADVICE, "open")


def test_a_passed_health_check_changes_nothing_and_a_failed_one_leaves_the_cause_open() -> None:
    def checked(status: HealthCheckStatus) -> Incident:
        return an_incident().evolve(health_check=HealthCheck(status=status, reason="DCGM level 4"))

    assert recommend(checked(HealthCheckStatus.PASSED)) == recommend(an_incident())
    failed = recommend(checked(HealthCheckStatus.FAILED))
    assert (failed.action, failed.cause) == (REPLACE, "open")


def test_an_ambiguous_verdict_is_never_advised_to_replace() -> None:
    ambiguous = an_incident(kind=VerdictKind.AMBIGUOUS, ranks=(1, 2)).evolve(history=(a_past(VerdictKind.CONCLUSIVE),))
    assert recommend(ambiguous).action == NO_ADVICE


def test_what_a_healthy_node_computes_wrongly_as_well_is_never_advised_to_be_replaced() -> None:
    software = Confirmation(status=ConfirmationStatus.SOFTWARE, reason="healthy node n9 differs as well")
    incident = an_incident().evolve(confirmation=software, history=(a_past(VerdictKind.CONCLUSIVE),))
    assert (recommend(incident).action, recommend(incident).cause) == (NO_ADVICE, "open")


def test_an_ambiguous_verdict_that_the_confirmation_settles_is_hardware_and_one_it_does_not_stays_open() -> None:
    ambiguous = an_incident(kind=VerdictKind.AMBIGUOUS, ranks=(1, 2))
    settled = Confirmation(status=ConfirmationStatus.REPRODUCED, reason="n1 alone differs", named="n1")
    assert recommend(ambiguous.evolve(confirmation=settled)).action == REPLACE
    unsettled = Confirmation(status=ConfirmationStatus.UNSETTLED, reason="both differ")
    assert recommend(ambiguous.evolve(confirmation=unsettled)).action == NO_ADVICE
    assert "both differ" in recommend(ambiguous.evolve(confirmation=unsettled)).reason


# --- approval


def test_an_unanswered_question_expires_and_a_person_who_goes_on_gets_a_new_deadline() -> None:
    question = asked(an_incident(), task_token="t1", now=NOW, policy=POLICY)
    assert settled(question, now=NOW) is None
    late = NOW + timedelta(hours=POLICY.approval_expires_after_hours)
    answer = settled(question, now=late)
    assert answer is not None
    assert answer[0] is Outcome.EXPIRED
    stopped = escalated(
        question, failed_state="RequestApproval", error="", cause="", task_token="e", now=late + timedelta(seconds=1)
    )
    again = asked(stopped, task_token="t2", now=late + timedelta(hours=1), policy=POLICY)
    assert settled(again, now=late + timedelta(hours=2)) is None


def test_a_decision_is_never_overwritten() -> None:
    question = asked(an_incident(), task_token="t", now=NOW, policy=POLICY)
    approved = decided(question, approve=True, by="x", comment="c" * 900, now=NOW)
    assert approved.approved
    refused = decision_refused(approved, approve=False, acknowledged=True, by_link=True, policy=POLICY)
    assert "already approved" in refused
    with pytest.raises(ValueError, match="no decision"):
        decided(approved, approve=False, by="y", comment="", now=NOW)


def test_nothing_can_be_decided_before_the_question_or_after_the_close() -> None:
    for incident in (
        an_incident(),
        asked(an_incident(), task_token="t", now=NOW, policy=POLICY).evolve(status=IncidentStatus.CLOSED),
    ):
        assert decision_refused(incident, approve=True, acknowledged=True, by_link=True, policy=POLICY)
