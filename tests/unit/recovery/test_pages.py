"""The incident's page: everything from an event is escaped, and it says what approving costs."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser

import pytest

from lambdas.domain.approval import asked, decided
from lambdas.domain.cluster_resolution import claimed
from lambdas.domain.incident import Incident, IncidentStatus, iso, open_incident
from lambdas.domain.policy import Policy
from lambdas.domain.records import (
    Confirmation,
    ConfirmationStatus,
    ConfirmedNode,
    Cordon,
    Evidence,
    HealthCheck,
    HealthCheckStatus,
)
from lambdas.domain.workflow import escalated
from lambdas.pages import render_incident, render_notice, security_headers
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import Alarm, DeviceReport, Verdict, VerdictKind, from_json, to_json

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
QUERY = {"scope": "decide", "expires": "1", "signature": HOSTILE}


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def page(incident: Incident, *, policy: Policy | None = None, minutes: int = 5, notice: str = "") -> str:
    return render_incident(
        incident,
        policy=policy or Policy(),
        query=QUERY,
        root="",
        now=NOW + timedelta(minutes=minutes),
        holder=incident.incident_id,
        notice=notice,
    )


def question(alarm: Alarm | None = None) -> Incident:
    incident = open_incident(alarm or an_alarm(), now=NOW, dry_run=False)
    (suspect, *_) = incident.suspects
    incident = incident.with_suspect(replace(suspect, instance_id="i-0abc", cordon=Cordon(at=iso(NOW), ours=True)))
    return asked(incident, task_token="secret-token", now=NOW, policy=Policy()).evolve(
        status=IncidentStatus.AWAITING_APPROVAL
    )


@pytest.mark.parametrize("status", [ConfirmationStatus.RUNNING, ConfirmationStatus.REPRODUCED])
@pytest.mark.parametrize("measured", [0.0, -1.0, 100.0, 1e300])
@pytest.mark.parametrize(("runs", "differing"), [(0, 3), (1, 10**400), (-5, -3), (10, 1000)])
def test_a_record_that_no_confirmation_can_have_measured_still_has_a_page(
    status: ConfirmationStatus, measured: float, runs: int, differing: int
) -> None:
    device = DeviceReport(device="cuda:0", runs=runs, differing=differing)
    confirmation = Confirmation(
        status=status,
        reason="n differs",
        hit_probability=measured,
        nodes=(ConfirmedNode(node_name="n", job_name="j", gpus=(device,)),),
    )
    stored = from_json(Incident, to_json(question().evolve(confirmation=confirmation)))
    text = page(stored)
    assert "N differs." in text
    assert "fault probability p = 1 a step" in text, "what was not measured is assumed"


def test_nothing_from_an_event_becomes_markup() -> None:
    alarm = an_alarm(run_id=HOSTILE, job_name=HOSTILE, namespace=HOSTILE)
    row = replace(alarm.suspects[0], node_name=HOSTILE, gpu_uuid=HOSTILE)
    alarm = replace(alarm, suspects=(row,), verdict=replace(alarm.verdict, reason=HOSTILE), detected_at=HOSTILE)
    incident = question(alarm)
    (suspect,) = incident.suspects
    incident = incident.with_suspect(replace(suspect, other_pods=(HOSTILE,), instance_id=HOSTILE)).evolve(
        evidence=Evidence(uri=HOSTILE, findings=(HOSTILE,)),
        health_check=HealthCheck(status=HealthCheckStatus.FAILED, reason=HOSTILE),
    )
    incident = incident.noted(at=NOW, state=HOSTILE, outcome=HOSTILE, reason=HOSTILE)
    seen = _Elements()
    seen.feed(page(incident, notice=HOSTILE))
    assert not {"script", "img", "iframe", "object"} & set(seen.tags)
    assert not [name for name in seen.attributes if name.startswith("on") or name in {"src", "style"}]
    assert "<script>" not in render_notice(HOSTILE, HOSTILE)


def test_the_style_is_the_one_that_the_policy_allows() -> None:
    import base64
    import hashlib

    (style,) = re.findall(r"<style>(.*?)</style>", page(question()), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in security_headers()["Content-Security-Policy"]


def test_the_page_says_what_is_asked_what_it_costs_and_what_it_destroys() -> None:
    text = page(question())
    for part in (
        "hyperpod-i-00000000000000002",
        "GPU-00000002",
        "i-0abc",
        "NVMe",
        "2 days 23 hours left",
        "step 99",
        "21 steps",
    ):
        assert part in text
    assert "secret-token" not in text


def test_the_planned_checkpoint_keeps_the_policys_margin_and_names_p_and_the_risk() -> None:
    text = page(question(), policy=Policy(assumed_hit_probability=0.3, audit_interval_steps=10))
    assert "at or before step 68" in text
    assert "p = 0.3" in text
    assert "risk 0.05" in text


def test_the_page_says_how_much_of_the_cluster_is_in_quarantine_and_how_much_may_be() -> None:
    nodes = {"logical-2", "logical-1"}
    shown = render_incident(question(), policy=Policy(), query=QUERY, root="", now=NOW, holder="", quarantined=nodes)
    assert "2 nodes in quarantine (logical-1, logical-2). The circuit breaker allows 2 in the cluster at once" in shown
    assert "0 nodes in quarantine. The circuit" in page(question())


def test_a_passed_health_check_is_not_shown_as_an_acquittal() -> None:
    check = HealthCheck(status=HealthCheckStatus.PASSED, reason="DCGM level 4")
    assert "clears nobody" in page(question().evolve(health_check=check))


@pytest.mark.parametrize("approve", [True, False])
def test_after_the_decision_the_page_shows_it_and_has_no_form(approve: bool) -> None:
    text = page(decided(question(), approve=approve, by="by link", comment="", now=NOW))
    assert ("Approved at" if approve else "Rejected at") in text
    assert "<form" not in text


def test_a_dry_run_and_an_incident_without_a_question_have_no_form() -> None:
    assert "<form" not in page(question().evolve(dry_run=True))
    assert "<form" not in page(open_incident(an_alarm(), now=NOW, dry_run=False))


def test_an_ambiguous_verdict_speaks_of_candidates() -> None:
    verdict = Verdict(
        kind=VerdictKind.AMBIGUOUS, reason="Two candidates.", suspects=an_alarm(ranks=(1, 2)).suspect_ranks
    )
    text = page(question(replace(an_alarm(ranks=(1, 2)), verdict=verdict)))
    assert "candidates" in text
    assert "Replace these nodes?" in text


def test_an_escalated_incident_offers_only_states_that_it_may_go_on_from() -> None:
    incident = open_incident(an_alarm(), now=NOW, dry_run=False)
    stopped = escalated(
        incident.evolve(suspects=claimed(incident.suspects)),
        failed_state="CordonNode",
        error="ApiError",
        cause="away",
        task_token="t",
        now=NOW,
    ).evolve(status=IncidentStatus.ESCALATED)
    text = page(stopped)
    assert '<option value="CordonNode" selected>' in text
    assert "ReplaceNode" not in text
    assert "ApiError: away" in text


def test_an_alarm_that_accuses_nobody_says_so_and_asks_for_no_history() -> None:
    shown = page(open_incident(an_alarm(kind=VerdictKind.NUMERICS), now=NOW, dry_run=False))
    assert "<h1>The training&#39;s numbers went wrong everywhere; no node is accused</h1>" in shown
    assert "no GPU and no node" in shown
    assert "History of this GPU" not in shown


def test_a_margin_that_reaches_back_before_the_first_step_is_no_negative_step() -> None:
    shown = page(question(), policy=Policy(assumed_hit_probability=0.01))
    assert "Planned: none. No checkpoint is old enough" in shown
    assert "step -" not in shown
