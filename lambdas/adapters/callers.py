"""Who gives a decision by a command: a signed ``GetCallerIdentity`` request of the caller's, sent from here.

Source: AWS STS API reference, GetCallerIdentity (it needs no permission); IAM user guide, "Create a signed AWS API
request".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.httpsession import URLLib3Session

from lambdas.domain.errors import LinkError, TransientError
from truestep.contract.decision import IDENTITY_BODY, IDENTITY_HEADER, IDENTITY_SECONDS, IDENTITY_TYPE

_URL: Final = re.compile(r"https://sts(\.[a-z]{2}(-[a-z]+)+-[0-9])?\.amazonaws\.com(\.cn)?/")
_ARN: Final = re.compile(r"<Arn>(arn:[^<\s]{1,512})</Arn>")
_AUTHORIZATION: Final = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[A-Za-z0-9_-]{1,128}/[0-9]{8}/[a-z0-9-]{1,32}/sts/aws4_request, "
    r"SignedHeaders=([a-z0-9;-]{1,1024}), Signature=[0-9a-f]{64}"
)
_DATE: Final = "x-amz-date"
_SENT: Final = {
    "authorization": _AUTHORIZATION,
    _DATE: re.compile(r"[0-9]{8}T[0-9]{6}Z"),
    "x-amz-security-token": re.compile(r"[!-~]{1,16384}"),
}
"""What is passed on of the headers that came, and all that each may hold: nothing that could end a header."""
_TIMEOUT_SECONDS: Final = 5


def caller_arn(identity: Mapping[str, Any], digest: str, *, function_arn: str, now: datetime) -> str:
    """ARN of whoever signed ``{"url", "headers"}`` for this decision. function_arn: of the function that decides.

    Raises `LinkError` for a request that is not such a one, that STS refuses, or whose signer is of another account
    than the function; `TransientError` where STS is silent. Neither quotes what came: it holds credentials.
    """
    url, headers = str(identity.get("url", "")), _headers(identity.get("headers"))
    sent = {name: headers[name] for name in _SENT if name in headers}
    if not (_is_sts(url) and _covers_the_decision(sent) and _fresh(sent, now)):
        raise LinkError(
            "who decides is not proved: sign GetCallerIdentity of STS for this decision, as truestep does, on a "
            "machine whose clock is right"
        )
    # STS would refuse it too, but cannot say why.
    if headers.get(IDENTITY_HEADER) != digest:
        raise LinkError(
            "the identity was signed for another decision or another deployment: decide with this deployment's outputs "
            "and its version of truestep"
        )
    sent |= {IDENTITY_HEADER: digest, "content-type": IDENTITY_TYPE}
    status, text = _send(url, sent)
    if status >= 500:
        raise TransientError(f"STS answered {status}")
    found = _ARN.search(text) if status == 200 else None
    if found is None:
        raise LinkError("STS does not confirm who decides: sign in again, and repeat the command within a minute")
    if _account(found[1]) != _account(function_arn):
        raise LinkError(
            "who decides is of another AWS account than this deployment: sign in to the deployment's account, and "
            "repeat the command"
        )
    return found[1]


def _send(url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    try:
        request = AWSRequest(method="POST", url=url, data=IDENTITY_BODY, headers=headers)
        answer = URLLib3Session(timeout=_TIMEOUT_SECONDS).send(request.prepare())
        status, text = answer.status_code, answer.text
    except (BotoCoreError, ValueError) as error:
        # Its text, and its traceback, may quote a header.
        raise TransientError(f"STS does not answer: {type(error).__name__}") from None
    return status, text


def _headers(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        return {}
    return {str(name).lower(): str(value) for name, value in given.items()}


def _covers_the_decision(sent: Mapping[str, str]) -> bool:
    if not all(_SENT[name].fullmatch(value) for name, value in sent.items()):
        return False
    signed = _AUTHORIZATION.fullmatch(sent.get("authorization", ""))
    return signed is not None and IDENTITY_HEADER in signed[1].split(";")


def _fresh(sent: Mapping[str, str], now: datetime) -> bool:
    try:
        signed_at = datetime.strptime(sent.get(_DATE, ""), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return False
    return abs((now - signed_at).total_seconds()) <= IDENTITY_SECONDS


def _account(arn: str) -> tuple[str, str]:
    """Partition and account: an account's number says nothing about another partition."""
    parts = arn.split(":")
    if len(parts) < 6 or not parts[4]:
        raise LinkError("who decides is not proved: an ARN without an account")
    return parts[1], parts[4]


def _is_sts(url: str) -> bool:
    configured = os.environ.get("AWS_ENDPOINT_URL")
    if configured:
        own = urlsplit(configured)
        return url == f"{own.scheme}://{own.netloc}/"
    return _URL.fullmatch(url) is not None
