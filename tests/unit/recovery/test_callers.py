"""Who decides from the terminal: what is taken for a proof, what is not, and that no credential gets into the log."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import HTTPClientError

from lambdas.adapters import callers
from lambdas.adapters.callers import caller_arn
from lambdas.decide_approval.handler import handler
from lambdas.domain.errors import LinkError, TransientError
from truestep.contract.decision import IDENTITY_HEADER, decider, decision_digest

NOW = datetime(2026, 3, 1, tzinfo=UTC)
REGION, NAME = "us-west-2", "truestep-prod-decide-approval"
FUNCTION = f"arn:aws:lambda:{REGION}:123456789012:function:{NAME}"
OWN = "arn:aws:sts::123456789012:assumed-role/oncall/jo"
FORM = {"decision": "approve"}
DIGEST = decision_digest("inc-1", FORM, deployment=decider(NAME, region=REGION))
CREDENTIAL = "Credential=AKIAEXAMPLE/20260301/us-west-2/sts/aws4_request"
NAMES = f"SignedHeaders=host;x-amz-date;{IDENTITY_HEADER}"
SIGNATURE = "Signature=" + "0" * 64
TOKEN = "SECRETTOKEN"
HEADERS = {
    "Authorization": f"AWS4-HMAC-SHA256 {CREDENTIAL}, {NAMES}, {SIGNATURE}",
    "X-Amz-Date": "20260301T000000Z",
    "X-Amz-Security-Token": TOKEN,
    IDENTITY_HEADER: DIGEST,
}


@dataclass
class Sts:
    """Answers every request in STS's place."""

    arn: str = OWN
    fails: bool = False
    asked: int = 0

    @property
    def status_code(self) -> int:
        return 200

    @property
    def text(self) -> str:
        return f"<GetCallerIdentityResult><Arn>{self.arn}</Arn></GetCallerIdentityResult>"

    def __call__(self, **_: Any) -> Sts:
        return self

    def send(self, request: Any) -> Sts:
        self.asked += 1
        if self.fails:
            raise HTTPClientError(error=f"invalid header in {dict(request.headers)}")
        return self


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Sts:
    sts = Sts()
    monkeypatch.setattr(callers, "URLLib3Session", sts)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    return sts


def asked(*, url: str = "https://sts.us-west-2.amazonaws.com/", function: str = FUNCTION, **headers: str) -> str:
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    digest = decision_digest("inc-1", FORM, deployment=decider(function))
    identity = {"url": url, "headers": HEADERS | changed}
    return caller_arn(identity, digest, function_arn=function, now=NOW)


@pytest.mark.parametrize("function", [FUNCTION, f"{FUNCTION}:live"])
def test_an_identity_of_the_functions_own_account_is_taken(sts: Sts, function: str) -> None:
    assert asked(function=function) == OWN


@pytest.mark.parametrize("arn", ["arn:aws:iam::999999999999:user/mallory", "arn:aws-cn:iam::123456789012:user/jo"])
def test_an_identity_of_another_account_is_refused(sts: Sts, arn: str) -> None:
    sts.arn = arn
    with pytest.raises(LinkError, match="another AWS account"):
        asked()


@pytest.mark.parametrize(("part", "other"), [("us-west-2", "eu-west-1"), ("-prod-", "-dev-")])
def test_an_identity_signed_for_another_deployment_is_refused(sts: Sts, part: str, other: str) -> None:
    with pytest.raises(LinkError, match="another deployment"):
        asked(function=FUNCTION.replace(part, other))
    assert not sts.asked


@pytest.mark.parametrize(
    "authorization",
    [
        f"AWS4-HMAC-SHA256 X-{NAMES}, {CREDENTIAL}, SignedHeaders=host;x-amz-date, {SIGNATURE}",
        f"AWS4-HMAC-SHA256 {CREDENTIAL}, {NAMES}, SignedHeaders=host, {SIGNATURE}",
        f"AWS4-HMAC-SHA256 {CREDENTIAL}, SignedHeaders=host;x-amz-date, {SIGNATURE}",
        f"AWS4-HMAC-SHA256 {CREDENTIAL}, {NAMES}, {SIGNATURE}\n",
    ],
)
def test_the_authorization_is_read_whole(sts: Sts, authorization: str) -> None:
    with pytest.raises(LinkError, match="not proved"):
        asked(Authorization=authorization)
    assert not sts.asked


@pytest.mark.parametrize(
    "changed",
    [
        {"X_Amz_Security_Token": f"{TOKEN}\n"},
        {"X_Amz_Security_Token": f"{TOKEN}\r\nHost: elsewhere"},
        {"X_Amz_Security_Token": f"{TOKEN}\N{EURO SIGN}"},
        {"X_Amz_Date": "２０２６0301T000000Z"},  # digits that Python reads and no header carries
        {"url": "https://["},
        {"url": "https://sts.us-west-2.amazon\taws.com/"},
        {"url": "https://sts.us-west-2.amazonaws.com/\n"},
    ],
)
def test_what_no_request_can_carry_is_refused_without_quoting_it(sts: Sts, changed: dict[str, str]) -> None:
    with pytest.raises(LinkError, match="not proved") as refused:
        asked(**changed)
    assert TOKEN not in "".join(traceback.format_exception(refused.value))
    assert not sts.asked


def test_a_failure_of_the_request_does_not_quote_it_either(sts: Sts) -> None:
    sts.fails = True
    with pytest.raises(TransientError, match="HTTPClientError") as failed:
        asked()
    assert TOKEN not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize(
    "changed",
    [{"form": ["approve"]}, {"form": {"comment": 1}}, {"form": {"comment": "\ud800"}}, {"identity": "me"}, {}],
)
def test_a_command_that_is_no_decision_is_refused_by_a_sentence(sts: Sts, changed: dict[str, Any]) -> None:
    class Context:
        invoked_function_arn = FUNCTION
        function_name = NAME

    stale = {"incident_id": "inc-1", "form": FORM, "identity": {"url": "https://[", "headers": HEADERS}}
    answer = handler({"decide": stale | changed}, Context())
    assert (answer["status"], sts.asked) == (403, 0)
    assert answer["notice"].startswith(("this is no decision", "who decides is not proved"))
