"""What the operator allows: safe defaults, no misspelt settings, and the two formulas."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdas.domain.approval import REMIND_AFTER
from lambdas.domain.breaker import quarantine_limit
from lambdas.domain.errors import SettingsError
from lambdas.domain.policy import HealthCheckWhen, Policy, ResumeWhen, margin_steps, policies_from_json
from lambdas.domain.workflow import REMIND_OF_STOP_AFTER

ASL = Path(__file__).parents[3] / "state_machines" / "recovery.asl.json"


def test_the_defaults_are_the_safe_ones() -> None:
    policy = Policy()
    assert policy.resume is ResumeWhen.AFTER_REPLACEMENT
    assert policy.health_check is HealthCheckWhen.BEFORE_APPROVAL
    assert not policy.allow_automatic_replacement
    assert policy.acknowledge_other_pods


@pytest.mark.parametrize(
    ("max_nodes", "percent", "group", "limit"),
    [(2, 10, 4, 1), (2, 10, 0, 1), (2, 10, 10, 1), (2, 10, 19, 1), (2, 10, 20, 2), (2, 10, 1000, 2), (8, 50, 9, 4)],
)
def test_the_limit_rounds_down_but_always_leaves_room_for_one_bad_node(
    max_nodes: int, percent: float, group: int, limit: int
) -> None:
    assert quarantine_limit(max_nodes=max_nodes, max_percent=percent, group_size=group) == limit


@pytest.mark.parametrize(("p", "steps"), [(1.0, 0), (0.3, 420), (0.1, 1422), (0.01, 14904)])
def test_the_margin_for_five_percent_risk_at_audits_every_hundred_steps(p: float, steps: int) -> None:
    assert margin_steps(interval_steps=100, hit_probability=p, risk=0.05) == pytest.approx(steps, abs=1)


@given(
    st.integers(2, 1000),
    st.floats(0.001, 0.999),
    st.floats(0.001, 0.5),
)
def test_audits_within_the_margin_miss_the_fault_with_at_most_the_risk(interval: int, p: float, risk: float) -> None:
    audits = margin_steps(interval_steps=interval, hit_probability=p, risk=risk) / interval
    # The newest clean audit passed in any case.
    assert math.exp(max(1, audits) * 2 * math.log1p(-p)) <= risk * (1 + 1e-9)


@pytest.mark.parametrize(("p", "risk", "interval"), [(0, 0.05, 100), (1.1, 0.05, 100), (0.5, 0, 100), (0.5, 0.05, 0)])
def test_a_margin_for_impossible_numbers_is_refused(p: float, risk: float, interval: int) -> None:
    with pytest.raises(ValueError, match="0 < p <= 1"):
        margin_steps(interval_steps=interval, hit_probability=p, risk=risk)


@pytest.mark.parametrize(("p", "steps"), [(0.83887, 0), (0.7764, 0), (0.7763, 100), (0.20654, 648)])
def test_no_margin_where_one_audit_misses_with_less_than_the_risk(p: float, steps: int) -> None:
    assert margin_steps(interval_steps=100, hit_probability=p, risk=0.05) == pytest.approx(steps, abs=1)


def test_no_margin_where_every_step_is_audited() -> None:
    assert margin_steps(interval_steps=1, hit_probability=0.01, risk=0.05) == 0


def test_a_measured_hit_probability_beats_the_assumed_one() -> None:
    policy = Policy(assumed_hit_probability=1.0)
    assert policy.margin_steps() == 0
    assert policy.margin_steps(0.3) == 420
    assert (policy.hit_probability(0.3), policy.hit_probability(None)) == (0.3, 1.0)


@pytest.mark.parametrize("stored", [100.0, 0.0, -0.1, math.inf, math.nan])
def test_an_impossible_measurement_on_record_measured_nothing(stored: float) -> None:
    policy = Policy(assumed_hit_probability=0.3)
    assert (policy.hit_probability(stored), policy.margin_steps(stored)) == (0.3, 420)


def test_polls_get_rarer_so_that_a_wait_of_two_days_fits_the_history() -> None:
    policy, waited, polls = Policy(), 0.0, 0
    while waited < 48 * 3600:
        waited += policy.poll_after(waited)
        polls += 1
    # A poll is about 12 history events, of which an execution may have 25,000.
    assert polls * 12 < 25_000


def test_a_cluster_overrides_only_what_it_names() -> None:
    default, clusters = policies_from_json({"risk": 0.01, "clusters": {"arn:c": {"dry_run": True}}})
    assert (default.dry_run, default.risk) == (False, 0.01)
    assert (clusters["arn:c"].dry_run, clusters["arn:c"].risk) == (True, 0.01)


@pytest.mark.parametrize(
    ("document", "said"),
    [({"dry_rum": True}, "dry_rum"), ({"risk": 2}, "risk"), ({"clusters": {"arn:c": {"resume": "now"}}}, "arn:c")],
)
def test_a_misspelt_or_impossible_setting_is_refused_by_name(document: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        policies_from_json(document)


@pytest.mark.parametrize("fields", [True, [], "dry_run", None])
def test_a_cluster_whose_policy_is_no_object_is_refused_by_name(fields: object) -> None:
    with pytest.raises(SettingsError, match="policy of arn:x: give the fields it overrides as an object"):
        policies_from_json({"clusters": {"arn:x": fields}})


def test_a_switch_takes_true_or_false_only_and_every_mistake_is_said_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        policies_from_json({"dry_run": "off", "assumed_hit_probability": 2.0})
    for field in ("dry_run", "assumed_hit_probability"):
        assert f"field '{field}'" in str(refused.value)


@pytest.mark.parametrize(
    ("state", "reminds_after"), [("RequestApproval", REMIND_AFTER), ("Escalate", REMIND_OF_STOP_AFTER)]
)
def test_the_shortest_link_that_is_allowed_works_until_people_are_told_again(
    state: str, reminds_after: timedelta
) -> None:
    """A state that waits for a person is entered again at its heartbeat, and reminds at the first one that is due."""
    heartbeat = timedelta(seconds=json.loads(ASL.read_text())["States"][state]["HeartbeatSeconds"])
    shortest = timedelta(hours=Policy.model_json_schema()["properties"]["link_valid_hours"]["minimum"])
    assert Policy(link_valid_hours=shortest / timedelta(hours=1))
    assert shortest > reminds_after + 2 * heartbeat
    with pytest.raises(SettingsError, match="link_valid_hours"):
        policies_from_json({"link_valid_hours": 24})
