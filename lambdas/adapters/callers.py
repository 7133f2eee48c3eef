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

_HOST: Final = re.compile(r"sts(\.[a-z]{2}(-[a-z]+)+-\d)?\.amazonaws\.com(\.cn)?")
_SIGNED: Final = re.compile(r"\bSignedHeaders=([a-z0-9;-]+)")
_ARN: Final = re.compile(r"<Arn>(arn:[^<\s]{1,512})</Arn>")
_TIMEOUT_SECONDS: Final = 5


def caller_arn(identity: Mapping[str, Any], digest: str, *, now: datetime) -> str:
    """ARN of whoever signed ``{"url", "headers"}`` for this decision.

    Raises `LinkError` for a request that is not such a one or that STS refuses, `TransientError` where STS is silent.
    """
    url, headers = str(identity.get("url", "")), _headers(identity.get("headers"))
    signed = _SIGNED.search(headers.get("authorization", ""))
    if not (_is_sts(url) and signed and IDENTITY_HEADER in signed[1].split(";") and _fresh(headers, now)):
        raise LinkError(
            "who decides is not proved: sign GetCallerIdentity of STS for this decision, as truestep does, on a "
            "machine whose clock is right"
        )
    names = ("authorization", "x-amz-date", "x-amz-security-token")
    sent = {name: headers[name] for name in names if name in headers}
    sent |= {IDENTITY_HEADER: digest, "content-type": IDENTITY_TYPE}
    try:
        request = AWSRequest(method="POST", url=url, data=IDENTITY_BODY, headers=sent)
        answer = URLLib3Session(timeout=_TIMEOUT_SECONDS).send(request.prepare())
    except BotoCoreError as error:
        raise TransientError(f"STS does not answer: {error}") from error
    if answer.status_code >= 500:
        raise TransientError(f"STS answered {answer.status_code}")
    found = _ARN.search(answer.text) if answer.status_code == 200 else None
    if found is None:
        raise LinkError("STS does not confirm who decides: sign in again, and repeat the command within a minute")
    return found[1]


def _headers(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        return {}
    return {str(name).lower(): str(value) for name, value in given.items()}


def _fresh(headers: Mapping[str, str], now: datetime) -> bool:
    try:
        signed_at = datetime.strptime(headers.get("x-amz-date", ""), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return False
    return abs((now - signed_at).total_seconds()) <= IDENTITY_SECONDS


def _is_sts(url: str) -> bool:
    parts = urlsplit(url)
    if parts.path != "/" or parts.query or parts.fragment:
        return False
    configured = os.environ.get("AWS_ENDPOINT_URL")
    if configured:
        own = urlsplit(configured)
        return (parts.scheme, parts.netloc) == (own.scheme, own.netloc)
    return parts.scheme == "https" and _HOST.fullmatch(parts.netloc) is not None
