"""The approval on real services: who may decide, what a decision does, and that it is taken once."""

from __future__ import annotations

import base64
import html
import io
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from lambdas.adapters.approval_links import KmsLinks
from lambdas.adapters.clock import SystemClock
from lambdas.adapters.decision_mac import KmsDecisionMacs
from lambdas.adapters.decisions import Decisions
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.metrics_evidence import read_evidence
from lambdas.adapters.notifications import SnsNotifier
from lambdas.adapters.runtime import observability
from lambdas.close_incident.handler import handler as close_incident
from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.approval import REMIND_AFTER
from lambdas.domain.errors import LinkError
from lambdas.domain.incident import Incident, iso, parse_iso
from lambdas.domain.records import Confirmation, ConfirmationStatus
from lambdas.request_approval.handler import handler as request_approval
from lambdas.settings import settings_from_environment
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, link_of, notice, post, request


def test_the_message_links_to_a_page_and_opening_it_changes_nothing(cloud: Cloud, incident: Incident) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    before = cloud.store.load(incident.incident_id)
    for _ in range(2):
        page = decide_approval(request("GET", path, query), CONTEXT)
        assert page["statusCode"] == 200
    targets = {html.unescape(action) for action in re.findall(r' action="([^"]*)"', page["body"])}
    assert targets == {f"{incident.incident_id}/decision?{urlencode(query)}"}
    assert "Rank 2&#39;s gradient differs from both replays" in page["body"]
    assert "Approve: replace" in page["body"]
    assert cloud.store.load(incident.incident_id) == before
    assert cloud.still_waits(execution)
    assert token not in json.dumps(page)


def test_pages_forbid_scripts_framing_caching_and_referrers(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    headers = decide_approval(request("GET", path, query), CONTEXT)["headers"]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert "'unsafe-inline'" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_approving_completes_the_waiting_state_and_is_recorded(cloud: Cloud, incident: Incident) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    page = post(path, query, decision="approve", comment="go <b>ahead</b>")
    assert page["statusCode"] == 200
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "approved"
    stored = cloud.store.load(incident.incident_id)
    assert stored.approved
    assert stored.approval is not None
    assert stored.approval.decision is not None
    assert stored.approval.decision.decided_by == "by link, from 192.0.2.7"
    assert "<b>" not in page["body"]
    assert "Approve: replace" not in page["body"]


def test_the_first_decision_stands(cloud: Cloud, incident: Incident) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    assert post(path, query, decision="reject", comment="maintenance")["statusCode"] == 200
    second = post(path, query, decision="approve")
    assert second["statusCode"] == 409
    assert "already rejected" in second["body"]
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "rejected"
    assert not cloud.store.load(incident.incident_id).approved


def test_a_decision_whose_completion_died_is_completed_by_sending_it_again(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)

    def died(*_: object) -> bool:
        raise ConnectionResetError

    with monkeypatch.context() as broken:
        broken.setattr(StepFunctions, "complete", died)
        with pytest.raises(ConnectionResetError):
            post(path, query, decision="approve")
    assert cloud.still_waits(execution)
    assert post(path, query, decision="approve")["statusCode"] == 409
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "approved"


def test_a_form_without_a_button_decides_nothing(cloud: Cloud, incident: Incident) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    assert post(path, query, comment="?")["statusCode"] == 400
    assert cloud.still_waits(execution)


@pytest.mark.parametrize("form", [{}, {"comment": ""}, {"comment": " \r\n\t "}])
def test_a_rejection_without_a_reason_is_a_bad_request_and_nothing_is_recorded(
    cloud: Cloud, incident: Incident, form: dict[str, str]
) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    before = cloud.store.load(incident.incident_id)
    status, (said,) = notice(post(path, query, decision="reject", **form))
    assert status == 400
    assert "a rejection needs a reason" in said
    assert cloud.store.load(incident.incident_id) == before
    assert cloud.still_waits(execution)
    assert post(path, query, decision="later", **form)["statusCode"] == 200
    assert post(path, query, decision="approve", **form)["statusCode"] == 200
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "approved"


@pytest.mark.parametrize(
    ("body", "encoded"),
    [
        ("decision=approve&" + "a=1&" * 30, False),
        ("decision=approve&comment=" + "x" * 20_000, False),
        (base64.b64encode(b"decision=approve&comment=\xff\xfe").decode(), True),
        ("decision=approve&comment=%ff", False),
        ("decision=approve&comment=\ud800", False),
        ("%%%", True),
    ],
)
def test_a_body_that_no_form_sends_is_looked_at_after_the_link_and_is_a_bad_request(
    cloud: Cloud, incident: Incident, body: str, encoded: bool
) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    for link, status in ((query, 400), ({}, 403)):
        sent = request("POST", f"{path}/decision", link) | {"body": body, "isBase64Encoded": encoded}
        assert decide_approval(sent, CONTEXT)["statusCode"] == status
    assert not cloud.store.load(incident.incident_id).approved


def test_a_form_sent_as_base64_is_a_form(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    body = base64.b64encode(b"decision=approve&comment=%C3%A9").decode()
    sent = request("POST", f"{path}/decision", query) | {"body": body, "isBase64Encoded": True}
    assert decide_approval(sent, CONTEXT)["statusCode"] == 303
    approval = cloud.store.load(incident.incident_id).approval
    assert approval is not None
    assert approval.decision is not None
    assert approval.decision.comment == "é"


@pytest.mark.parametrize("field", ["scope", "expires", "signature"])
@pytest.mark.parametrize("value", ["", "x", "99999999999", "A" * 43])
def test_a_changed_link_shows_and_decides_nothing(cloud: Cloud, incident: Incident, field: str, value: str) -> None:
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    forged = {**query, field: value}
    assert decide_approval(request("GET", path, forged), CONTEXT)["statusCode"] == 403
    assert post(path, forged, decision="approve")["statusCode"] == 403
    assert not cloud.store.load(incident.incident_id).approved
    assert cloud.still_waits(execution)


def test_a_link_of_one_incident_does_not_open_another(cloud: Cloud, incident: Incident) -> None:
    _, query = asked(cloud, incident, cloud.waiting_execution()[1])
    other = decide_approval(request("GET", "/incidents/inc-0123456789abcdef", query), CONTEXT)
    assert other["statusCode"] == 403


def test_an_expired_link_says_that_it_has_expired(cloud: Cloud) -> None:
    links = KmsLinks(cloud.client("kms"), cloud.key_id, "https://approval.example")
    now = SystemClock().now()
    url = links.url("inc-0123456789abcdef", expires_at=now + timedelta(seconds=60))
    query = dict(parse_qsl(urlsplit(url).query))
    links.verify("inc-0123456789abcdef", query, now=now)
    with pytest.raises(LinkError, match="expired"):
        links.verify("inc-0123456789abcdef", query, now=now + timedelta(seconds=61))


def test_neither_token_nor_signature_is_logged(cloud: Cloud, incident: Incident) -> None:
    written = io.StringIO()
    for function in ("request_approval", "decide_approval"):
        outputs = [h for h in observability(function).logger.handlers if isinstance(h, logging.StreamHandler)]
        outputs[0].setStream(written)
    _, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    decide_approval(request("GET", path, query), CONTEXT)
    post(path, query, decision="approve")
    post(path, {**query, "signature": "x"}, decision="approve")
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    answered = [line["status"] for line in lines if line.get("message") == "answered"]
    assert answered == [200, 303, 200, 403]
    assert token not in str(lines)
    assert query["signature"] not in str(lines)


def test_a_reminder_asks_again_with_a_new_token_and_keeps_the_deadline(cloud: Cloud, incident: Incident) -> None:
    asked(cloud, incident, cloud.waiting_execution()[1])
    stored = cloud.store.load(incident.incident_id)
    first = stored.approval
    assert first is not None
    long_ago = iso(parse_iso(first.announced_at) - REMIND_AFTER)
    cloud.store.save(stored.evolve(approval=replace(first, announced_at=long_ago)))
    execution, token = cloud.waiting_execution()
    request_approval({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    (reminder,) = cloud.messages()
    assert reminder["Subject"].startswith("Reminder")
    second = cloud.store.load(incident.incident_id).approval
    assert second is not None
    assert (second.announcements, second.expires_at) == (2, first.expires_at)
    path, query = link_of(reminder)
    post(path, query, decision="approve")
    assert cloud.output(execution) is not None


def test_an_entry_that_died_before_its_message_leaves_it_to_the_next_one(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says that the state waits; nobody has been told."""

    def died(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(SnsNotifier, "notify", died)
        with pytest.raises(KeyboardInterrupt):
            request_approval({"incident_id": incident.incident_id, "task_token": "lost"}, CONTEXT)
    assert cloud.store.load(incident.incident_id).timeline[-1].outcome == "waiting"
    execution, token = cloud.waiting_execution()
    path, query = asked(cloud, incident, token)
    request_approval({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    assert cloud.messages() == [], "people are told once"
    post(path, query, decision="approve")
    assert cloud.output(execution) is not None


def test_a_state_entered_again_after_the_decision_goes_on_at_once(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    post(path, query, decision="approve")
    execution, token = cloud.waiting_execution()
    answer = request_approval({"incident_id": incident.incident_id, "task_token": token}, CONTEXT)
    assert answer["outcome"] == "approved"
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "approved"
    assert cloud.messages() == []


def test_a_dry_run_announces_and_replaces_nothing(cloud: Cloud, incident: Incident) -> None:
    dry = cloud.store.save(incident.evolve(dry_run=True))
    execution, token = cloud.waiting_execution()
    answer = request_approval({"incident_id": dry.incident_id, "task_token": token}, CONTEXT)
    assert answer["outcome"] == "rejected"
    (message,) = cloud.messages()
    assert "DRY RUN" in message["Message"]
    assert cloud.output(execution) is not None
    path, query = link_of(message)
    assert post(path, query, decision="approve")["statusCode"] == 409


def test_other_jobs_pods_must_be_acknowledged_before_an_approval(cloud: Cloud, incident: Incident) -> None:
    (suspect,) = incident.suspects
    busy = incident.with_suspect(suspect.__class__(node_name=suspect.node_name, other_pods=("team-b/server-0",)))
    cloud.store.save(busy)
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    refused = post(path, query, decision="approve")
    assert refused["statusCode"] == 409
    assert "team-b/server-0" in refused["body"]
    assert post(path, query, decision="approve", acknowledge="yes")["statusCode"] == 200


def test_a_link_may_not_approve_where_the_policy_forbids_it_but_may_reject(
    cloud: Cloud, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({"replacement_by_link": False}))
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    assert "Approve: replace" not in decide_approval(request("GET", path, query), CONTEXT)["body"]
    assert post(path, query, decision="approve")["statusCode"] == 409
    assert post(path, query, decision="reject", comment="maintenance")["statusCode"] == 200


def test_closing_reports_releases_the_claims_and_can_be_repeated(cloud: Cloud, incident: Incident) -> None:
    (suspect,) = incident.suspects
    cloud.store.claim_nodes(incident.incident_id, incident.job.cluster_arn, ["logical-1"], limit=2)
    cloud.store.save(
        incident.with_suspect(suspect.__class__(node_name=suspect.node_name, claim_key="logical-1")).evolve(
            verification=incident.verification.__class__(task_token="secret-token"),
            confirmation=Confirmation(status=ConfirmationStatus.RUNNING, reason="it runs again"),
        )
    )
    for _ in range(2):
        answer = close_incident({"incident_id": incident.incident_id}, CONTEXT)
        assert answer["outcome"] == "closed"
    assert cloud.store.holder(incident.job) is None
    assert cloud.store.quarantined(incident.job.cluster_arn) == frozenset()
    key = f"incidents/{incident.incident_id}/report.json"
    body = cloud.client("s3").get_object(Bucket=cloud.bucket, Key=key)["Body"].read().decode()
    assert json.loads(body)["incident"]["incident_id"] == incident.incident_id
    assert json.loads(body)["incident"]["confirmation"]["status"] == "skipped", "nobody waits for it any more"
    assert "secret-token" not in body


def test_of_many_decisions_at_once_one_is_recorded_and_completes_the_state(cloud: Cloud, incident: Incident) -> None:
    execution, token = cloud.waiting_execution()
    _, query = asked(cloud, incident, token)
    decisions = Decisions(
        settings=settings_from_environment("decide_approval"),
        store=cloud.store,
        links=KmsLinks(cloud.client("kms"), cloud.key_id),
        signer=KmsDecisionMacs(cloud.client("kms"), cloud.decision_key_id),
        executions=StepFunctions(cloud.client("stepfunctions")),
        clock=SystemClock(),
        evidence=partial(read_evidence, cloud.client("s3")),
    )

    def decide(word: str) -> int:
        return decisions.decide(incident.incident_id, query, f"decision={word}&comment=why".encode(), by=word).status

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(decide, ["approve", "reject"] * 3))
    assert sorted(statuses) == [303, 409, 409, 409, 409, 409]
    output = cloud.output(execution)
    assert output is not None
    assert (output["outcome"] == "approved") == cloud.store.load(incident.incident_id).approved
