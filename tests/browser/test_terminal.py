"""Incidents from the terminal: the same decisions as on the page, under the identity of who decides."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from local_stack.access_keys import ADMINISTRATOR, SECRET_ACCESS_KEY
from tests.browser.site import STAGE, Site
from truestep.cli import main
from truestep.cli.deployment import Deployment
from truestep.cli.incidents import signed_identity
from truestep.contract.decision import IDENTITY_BODY, IDENTITY_HEADER, decider, decision_digest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def truestep(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``truestep incidents ...`` against the deployment; exit code, output and complaint without their wrapping."""
    for name, value in {
        "AWS_ENDPOINT_URL": site.stack.endpoint_url,
        "AWS_REGION": site.stack.region,
        "AWS_ACCESS_KEY_ID": ADMINISTRATOR,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "COLUMNS": "80",
    }.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["incidents", *arguments, "--stage", STAGE, "--outputs", str(site.outputs)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, " ".join(printed.err.split())

    return run


def invoke(site: Site, decide: dict[str, Any]) -> dict[str, Any]:
    answer = site.stack.client("lambda").invoke(
        FunctionName=site.stack.outputs["DecideFunction"], Payload=json.dumps({"decide": decide})
    )
    assert "FunctionError" not in answer
    returned: dict[str, Any] = json.loads(answer["Payload"].read())
    return returned


def deployment(site: Site) -> Deployment:
    import boto3

    session = boto3.session.Session(
        aws_access_key_id=ADMINISTRATOR, aws_secret_access_key=SECRET_ACCESS_KEY, region_name=site.stack.region
    )
    return Deployment(outputs=dict(site.stack.outputs), session=session)


def test_an_approval_from_the_terminal_ends_the_wait_and_says_who_gave_it(site: Site, truestep: Run) -> None:
    incident = site.incident("terminal-approve")
    _, execution = site.ask(incident)
    code, out, _ = truestep("list")
    assert code == 0
    assert f"{incident.incident_id}  awaiting approval" in out
    code, shown, _ = truestep("show", incident.incident_id)
    assert shown.startswith(f"{incident.incident_id}  awaiting approval\n"), "list and show say the same"
    same_deployment = ["--stage", STAGE, "--outputs", str(site.outputs)]
    typed = next(line for line in shown.splitlines() if line.startswith("  truestep incidents approve "))
    assert shlex.split(typed) == ["truestep", "incidents", "approve", incident.incident_id, *same_deployment]
    code, out, _ = truestep("approve", incident.incident_id, "--comment", "seen", "--json")
    assert code == 0
    assert "task_token" not in out
    decision = json.loads(out)["approval"]["decision"]
    assert re.match(r"arn:aws:(iam|sts)::\d{12}:", decision["decided_by"])
    assert (decision["approved"], decision["comment"]) == (True, "seen")
    assert site.outcome(execution)["outcome"] == "approved"


def test_the_consoles_link_is_printed_whole_and_opens_it(site: Site, truestep: Run) -> None:
    code, out, _ = truestep("console")
    link, until = out.splitlines()
    assert code == 0
    assert until.endswith("UTC, and decides nothing.")
    with urllib.request.urlopen(link, timeout=60) as page:  # noqa: S310 - loopback
        assert "Nodes in quarantine" in page.read().decode()


def test_a_rejection_and_then_a_refusal_that_says_who_was_first(site: Site, truestep: Run) -> None:
    incident = site.incident("terminal-reject")
    _, execution = site.ask(incident)
    code, out, _ = truestep("reject", incident.incident_id, "--reason", "maintenance")
    assert code == 0
    assert re.search(
        r"rejected\. Recorded as decided by arn:aws:\S+, with the comment: maintenance$", " ".join(out.split())
    )
    assert site.outcome(execution)["outcome"] == "rejected"
    code, out, complaint = truestep("approve", incident.incident_id)
    assert (code, out) == (2, "")
    assert "already rejected" in complaint
    code, out, _ = truestep("show", incident.incident_id)
    assert "maintenance" in " ".join(out.split())
    assert out.splitlines()[0].startswith(f"{incident.incident_id}  ")
    assert "_" not in out.splitlines()[0]
    assert "GPU-00000002" in out
    assert f"truestep incidents approve {incident.incident_id}" not in out, "it is decided"


def test_mistakes_are_sentences(site: Site, truestep: Run) -> None:
    incident = site.incident("terminal-mistakes")
    for arguments, words in (
        (("show", "inc-0000000000000000"), "no incident 'inc-0000000000000000'"),
        (("approve", "inc-0000000000000000"), "no incident inc-0000000000000000"),
        (("approve", incident.incident_id), "no decision is asked for"),
        (("resume", incident.incident_id, "--from", "Nowhere"), "Not recorded"),
        (("reject", incident.incident_id), "Missing option '--reason'"),
    ):
        code, out, complaint = truestep(*arguments)
        assert (code, out) == (2, "")
        assert words in complaint


def digest_of(site: Site, incident_id: str, form: dict[str, str]) -> str:
    function = decider(site.stack.outputs["DecideFunction"], region=site.stack.region)
    return decision_digest(incident_id, form, deployment=function)


def test_the_signature_of_an_identity_is_good_for_one_decision_alone(site: Site) -> None:
    digest = digest_of(site, "inc-1", {"decision": "approve"})
    identity = signed_identity(deployment(site), digest)

    def signature(value: str) -> str:
        headers = {**identity["headers"], IDENTITY_HEADER: value}
        del headers["Authorization"]
        request = AWSRequest(method="POST", url=identity["url"], data=IDENTITY_BODY, headers=headers)
        request.context["timestamp"] = identity["headers"]["X-Amz-Date"]
        signer = SigV4Auth(Credentials(ADMINISTRATOR, SECRET_ACCESS_KEY), "sts", site.stack.region)
        return str(signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request))

    assert identity["headers"]["Authorization"].endswith(f"Signature={signature(digest)}")
    other = signature(digest_of(site, "inc-2", {"decision": "approve"}))
    assert not identity["headers"]["Authorization"].endswith(other)


@pytest.mark.parametrize(
    ("name", "part", "other"),
    [
        ("url", "http://", "http://user@"),
        ("url", "/", "/elsewhere"),
        ("url", "/", "/?Action=GetSessionToken"),
        ("Authorization", IDENTITY_HEADER, "x-k8s-aws-id"),
        ("X-Amz-Date", "20", "19"),
        ("X-Amz-Date", "T", ""),
    ],
)
def test_what_is_no_identity_for_a_decision_decides_nothing(site: Site, name: str, part: str, other: str) -> None:
    incident = site.incident(f"terminal-forged-{name}-{other.strip('/?:@=')}".lower())
    _, execution = site.ask(incident)
    form = {"decision": "approve"}
    identity = signed_identity(deployment(site), digest_of(site, incident.incident_id, form))
    identity["url"] = f"{site.stack.endpoint_url}/"
    holder = identity if name == "url" else identity["headers"]
    head, found, tail = holder[name].rpartition(part)
    assert found
    holder[name] = head + other + tail
    refused = invoke(site, {"incident_id": incident.incident_id, "form": form, "identity": identity})
    assert (refused["status"], "not proved" in refused["notice"]) == (403, True)
    assert site.waits(execution)
