"""The console in a real browser: what it shows of a deployment, and to whom."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page, expect

from lambdas.adapters.approval_links import ConsoleLinks, KmsLinks
from lambdas.domain.incident import IncidentStatus, iso
from lambdas.domain.records import TrainingAttempt
from lambdas.domain.workflow import escalated
from tests.browser.conftest import DESK, PHONE
from tests.browser.site import Site
from tests.browser.test_page import BUDGET_BYTES, HOSTILE, look, violations
from tests.unit.recovery.alarms import an_alarm
from truestep.contract import CheckpointEvent, CheckpointRef, Step, Verdict, VerdictKind

Open = Callable[..., Page]
Keep = Callable[..., None]
EMPTY = ("No incident is open", "No job has reported yet", "No GPU was suspected")


def console(site: Site) -> str:
    """The link that ``truestep incidents console`` prints."""
    answer = site.stack.client("lambda").invoke(
        FunctionName=site.stack.outputs["ConsoleFunction"], Payload=json.dumps({"console": {}})
    )
    payload = json.loads(answer["Payload"].read())
    assert "FunctionError" not in answer, payload
    link: str = payload["url"]
    return link


@pytest.fixture(scope="module")
def empty(site: Site) -> str:
    """The console of a deployment in which nothing has happened. Other modules may have opened incidents before."""
    items = site.stack.client("dynamodb").scan(TableName=site.stack.outputs["TableName"])["Items"]
    for item in items:
        key = {name: item[name] for name in ("PK", "SK")}
        site.stack.client("dynamodb").delete_item(TableName=site.stack.outputs["TableName"], Key=key)
    return console(site)


@pytest.fixture(scope="module")
def told(site: Site, empty: str) -> dict[str, str]:
    """What a few days leave behind: name -> incident id."""
    now, store = datetime.now(UTC), site.store
    asked = site.incident("llama-pretrain")
    (suspect,) = asked.suspects
    store.claim_nodes(asked.incident_id, site.stack.outputs["ClusterArns"], ["worker-17"], limit=2)
    asked = store.save(asked.with_suspect(dataclasses.replace(suspect, claim_key="worker-17")))
    site.ask(asked)
    stopped = site.incident("vision-finetune", now=now - timedelta(hours=5))
    stopped = store.save(
        escalated(
            stopped,
            failed_state="StopTraining",
            error="JobStillRunning",
            cause="2 pods are left",
            task_token="secret-of-the-state",
            now=now,
        ).evolve(status=IncidentStatus.ESCALATED)
    )
    closed = site.incident("embeddings", now=now - timedelta(days=3))
    closed = store.save(closed.evolve(status=IncidentStatus.CLOSED, closed_at=iso(now - timedelta(days=2))))
    for incident in (asked, stopped, closed):
        store.record_gpus(incident)
        seen = iso(now - timedelta(minutes=4))
        store.record_attempt(incident.job, TrainingAttempt(attempt_id="a", heard_at=seen, seen_at=seen))
    for step, trust in ((4100, "trusted"), (4200, "written")):
        uri = f"s3://checkpoints/llama/step-{step:08d}"
        event = CheckpointEvent(
            run=asked.alarm.run,
            checkpoint=CheckpointRef(uri=uri, step=Step(step), manifest_sha256=f"{step:064x}"),
            weights_fingerprint="v1:00",
            at=iso(now - timedelta(minutes=9)),
        )
        store.record_checkpoint(asked.job, event, trust)
    return {"asked": asked.incident_id, "stopped": stopped.incident_id, "closed": closed.incident_id}


def test_a_deployment_in_which_nothing_happened_says_so(empty: str, open_page: Open, keep: Keep) -> None:
    page = open_page(empty)
    for text in (*EMPTY, "0 nodes in quarantine. The circuit breaker allows 2 in the cluster at once"):
        expect(page.locator("main")).to_contain_text(text)
    look(page, keep, "console-empty")


@pytest.mark.parametrize(("screen", "viewport"), [("desk", DESK), ("phone", PHONE)])
def test_the_console_is_accessible_in_every_light_and_size(
    site: Site, told: dict[str, str], open_page: Open, keep: Keep, screen: str, viewport: dict[str, int]
) -> None:
    page = open_page(console(site), viewport=viewport, java_script_enabled=True)
    look(page, keep, f"console-{screen}")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], "the page scrolls sideways"


def test_the_console_shows_the_deployment_and_no_secret(site: Site, told: dict[str, str], open_page: Open) -> None:
    page = open_page(console(site), java_script_enabled=False)
    expect(page.get_by_role("heading", level=1)).to_have_text("2 incidents open, 1 waiting for a decision, 1 stopped")
    for incident_id in (told["asked"], told["stopped"]):
        expect(page.locator(f"article:has(#{incident_id})")).to_contain_text("truestep incidents show")
    assert page.locator("article").count() == 2
    main = page.locator("main")
    for text in (
        "Stopped at StopTraining and waiting for a person. JobStillRunning: 2 pods are left",
        "1 node in quarantine (worker-17): 1 of 24 in workers (4%)",
        "but always one): 2 for workers",
        f"held by {told['asked']}",
        "Step 4100: s3://checkpoints/llama/step-00004100",
        "No trusted checkpoint among its 50 newest",
        f"{told['closed']}: conclusive verdict on hyperpod-i-",
        ": no decision; closed ",
    ):
        expect(main).to_contain_text(text)
    content = page.content()
    assert "step-00004200" not in content
    assert "secret-of-the-state" not in content
    assert "signature=" not in content, "the page must not hand the link on"
    assert page.locator("form, a, button, img, script").count() == 0, "there is nothing to press"


def test_the_console_is_one_small_answer_that_allows_no_script(
    site: Site, told: dict[str, str], open_page: Open
) -> None:
    page = open_page(console(site))
    answers = []
    page.on("response", lambda answer: answers.append(answer))
    first = page.reload()
    assert first is not None
    assert len(answers) == 1
    assert len(first.body()) < BUDGET_BYTES
    headers = first.headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "unsafe-inline" not in headers["content-security-policy"]
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")


def test_what_events_say_is_text_and_never_markup(
    site: Site, told: dict[str, str], open_page: Open, keep: Keep
) -> None:
    alarm = an_alarm()
    row = dataclasses.replace(alarm.suspects[0], gpu_uuid=HOSTILE, node_name=HOSTILE, pod_name=HOSTILE)
    verdict = Verdict(kind=VerdictKind.CONCLUSIVE, reason=HOSTILE, suspects=alarm.suspect_ranks)
    incident = site.incident(HOSTILE, verdict=verdict, suspects=(row,))
    site.store.record_gpus(incident)
    site.store.record_attempt(incident.job, TrainingAttempt(attempt_id=HOSTILE, heard_at=HOSTILE, seen_at=HOSTILE))
    page = open_page(console(site))
    expect(page.locator(f"article:has(#{incident.incident_id}) dl")).to_contain_text(HOSTILE)
    assert page.locator("script, #evil, img").count() == 0
    assert violations(page) == []
    keep(page, "console-injection")
    site.store.save(site.store.load(incident.incident_id).evolve(status=IncidentStatus.CLOSED, closed_at=HOSTILE))


def test_a_link_opens_what_it_was_made_for_and_only_while_it_lasts(
    site: Site, told: dict[str, str], open_page: Open
) -> None:
    functions = {one.name: one.environment for one in site.stack.deployment.functions}
    decide = functions["truestep-browser-request-approval"]["TRUESTEP_HMAC_KEY_ID"]
    show = functions["truestep-browser-show-console"]["TRUESTEP_CONSOLE_KEY_ID"]
    assert decide != show
    kms, base, soon = site.stack.client("kms"), site.stack.outputs["ApprovalUrl"], timedelta(minutes=5)
    later, over = datetime.now(UTC) + soon, datetime.now(UTC) - timedelta(seconds=1)
    genuine = console(site)
    incident = KmsLinks(kms, decide, base).url(told["asked"], expires_at=later)
    page = open_page(ConsoleLinks(kms, show, base).url(expires_at=over))
    expect(page.get_by_role("heading")).to_have_text("This link does not work")
    expect(page.locator("main")).to_contain_text("has expired; truestep incidents console")
    for link in (
        genuine.replace("expires=", "expires=9"),
        genuine[:-1] + ("A" if genuine[-1] != "A" else "E"),
        genuine.replace("scope=console", "scope=decide"),
        f"{base}/console",
        # Another page's signature, or another key's.
        f"{base}/console?{incident.partition('?')[2]}",
        ConsoleLinks(kms, decide, base).url(expires_at=later),
        f"{incident.partition('?')[0]}?{genuine.partition('?')[2]}",
        KmsLinks(kms, show, base).url(told["asked"], expires_at=later),
    ):
        answer = page.request.get(link)
        assert (answer.status, "not valid" in answer.text(), told["asked"] in answer.text()) == (403, True, False)
    assert page.request.get(genuine).status == page.request.get(incident).status == 200
    assert page.request.post(genuine, form={"decision": "approve"}).status == 404, "the console takes no decision"


def test_no_log_holds_a_links_signature(site: Site, told: dict[str, str], open_page: Open) -> None:
    link = console(site)
    open_page(link)
    signature = link.partition("signature=")[2]
    (log,) = (site.stack.state_dir / "logs" / "functions").glob("*show-console*.log")
    text = log.read_text()
    assert "signed a link" in text
    assert '"path":"/console"' in text.replace(" ", "")
    assert signature not in text
