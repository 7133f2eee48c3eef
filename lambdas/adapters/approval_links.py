"""`lambdas.ports.Links`: links signed by KMS HMAC keys that never leave KMS, so that nothing here can leak them.

A signature covers what the link is of, its scope and its expiry, each on a line of its own; none of the three can hold
a line break. KMS compares in constant time. Links that decide an incident and links of the console have a key each: who
can make one kind cannot make the other.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.domain.errors import LinkError
from truestep.contract import INCIDENT_ID

SCOPE: Final = "decide"
CONSOLE_SCOPE: Final = "console"
_ALGORITHM: Final = "HMAC_SHA_256"
_NEWEST: Final = "open the newest message of the incident"
_CONSOLE: Final = "truestep incidents console prints a new one"


class KmsLinks:
    """Signs and verifies decision links. `client` is a boto3 KMS client, `key_id` an HMAC_256 key."""

    def __init__(self, client: Any, key_id: str, base_url: str = "") -> None:
        self._key = _Key(client, key_id)
        self._base_url = base_url.rstrip("/")

    def url(self, incident_id: str, *, expires_at: datetime) -> str:
        """The page of the incident, with a signature over incident, scope and expiry."""
        query = self._key.signed(incident_id, SCOPE, expires_at)
        return f"{self._base_url}/incidents/{quote(incident_id, safe='')}?{query}"

    def verify(self, incident_id: str, query: Mapping[str, str], *, now: datetime) -> None:
        """Raises `LinkError` unless the query is one that `url` made for this incident and has not expired."""
        if not INCIDENT_ID.fullmatch(incident_id):
            raise LinkError(_refused(_NEWEST))
        self._key.check(incident_id, SCOPE, query, now=now, otherwise=_NEWEST)


class ConsoleLinks:
    """Signs and verifies links of the console, which show everything and decide nothing. Arguments as of `KmsLinks`."""

    def __init__(self, client: Any, key_id: str, base_url: str = "") -> None:
        self._key = _Key(client, key_id)
        self._base_url = base_url.rstrip("/")

    def url(self, *, expires_at: datetime) -> str:
        """The console, with a signature over scope and expiry."""
        return f"{self._base_url}/console?{self._key.signed('', CONSOLE_SCOPE, expires_at)}"

    def verify(self, query: Mapping[str, str], *, now: datetime) -> datetime:
        """When the link ends. Raises `LinkError` unless the query is one that `url` made and has not expired."""
        return self._key.check("", CONSOLE_SCOPE, query, now=now, otherwise=_CONSOLE)


class _Key:
    def __init__(self, client: Any, key_id: str) -> None:
        self._client = client
        self._key_id = key_id

    def signed(self, subject: str, scope: str, expires_at: datetime) -> str:
        expires = str(int(expires_at.timestamp()))
        with transient_errors():
            answer = self._client.generate_mac(
                KeyId=self._key_id, MacAlgorithm=_ALGORITHM, Message=_message(subject, scope, expires)
            )
        signature = base64.urlsafe_b64encode(answer["Mac"]).rstrip(b"=").decode()
        return urlencode({"scope": scope, "expires": expires, "signature": signature})

    def check(self, subject: str, wanted: str, query: Mapping[str, str], *, now: datetime, otherwise: str) -> datetime:
        """`otherwise`: what to do where the link is refused."""
        scope, expires, signature = (query.get(name, "") for name in ("scope", "expires", "signature"))
        mac = _decoded(signature)
        if not re.fullmatch(r"[0-9]{1,12}", expires) or scope != wanted or mac is None:
            raise LinkError(_refused(otherwise))
        try:
            with transient_errors():
                self._client.verify_mac(
                    KeyId=self._key_id,
                    MacAlgorithm=_ALGORITHM,
                    Message=_message(subject, scope, expires),
                    Mac=mac,
                )
        except ClientError as error:
            if error_code(error) != "KMSInvalidMacException":
                raise
            raise LinkError(_refused(otherwise)) from error
        # After the signature: only the holder of a genuine link learns that it has merely expired.
        if now.timestamp() >= int(expires):
            raise LinkError(f"this link has expired; {otherwise}")
        return datetime.fromtimestamp(int(expires), UTC)


def _refused(otherwise: str) -> str:
    return f"this link is not valid; {otherwise}"


def _message(subject: str, scope: str, expires: str) -> bytes:
    return f"{subject}\n{scope}\n{expires}".encode()


def _decoded(signature: str) -> bytes | None:
    try:
        mac = base64.b64decode(signature + "=" * (-len(signature) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    # The last character carries bits that decoding ignores: only the spelling that `signed` gives is the signature.
    if len(mac) != 32 or base64.urlsafe_b64encode(mac).rstrip(b"=").decode() != signature:
        return None
    return mac
