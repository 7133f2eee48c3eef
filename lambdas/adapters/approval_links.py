"""`lambdas.ports.Links`: links signed by a KMS HMAC key that never leaves KMS, so that nothing here can leak it.

The signature covers incident, scope and expiry, each on a line of its own; none of the three can hold a line break. KMS
compares in constant time.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.domain.errors import LinkError
from lambdas.domain.incident import INCIDENT_ID

SCOPE: Final = "decide"
_ALGORITHM: Final = "HMAC_SHA_256"
_REFUSED: Final = "this link is not valid; open the newest message of the incident"


class KmsLinks:
    """Signs and verifies decision links. `client` is a boto3 KMS client, `key_id` an HMAC_256 key."""

    def __init__(self, client: Any, key_id: str, base_url: str = "") -> None:
        self._client = client
        self._key_id = key_id
        self._base_url = base_url.rstrip("/")

    def url(self, incident_id: str, *, expires_at: datetime) -> str:
        """The page of the incident, with a signature over incident, scope and expiry."""
        expires = str(int(expires_at.timestamp()))
        with transient_errors():
            answer = self._client.generate_mac(
                KeyId=self._key_id, MacAlgorithm=_ALGORITHM, Message=_message(incident_id, SCOPE, expires)
            )
        signature = base64.urlsafe_b64encode(answer["Mac"]).rstrip(b"=").decode()
        query = urlencode({"scope": SCOPE, "expires": expires, "signature": signature})
        return f"{self._base_url}/incidents/{quote(incident_id, safe='')}?{query}"

    def verify(self, incident_id: str, query: Mapping[str, str], *, now: datetime) -> None:
        """Raises `LinkError` unless the query is one that `url` made for this incident and has not expired."""
        scope, expires, signature = (query.get(name, "") for name in ("scope", "expires", "signature"))
        well_formed = INCIDENT_ID.fullmatch(incident_id) and re.fullmatch(r"[0-9]{1,12}", expires) and scope == SCOPE
        if not well_formed:
            raise LinkError(_REFUSED)
        try:
            with transient_errors():
                self._client.verify_mac(
                    KeyId=self._key_id,
                    MacAlgorithm=_ALGORITHM,
                    Message=_message(incident_id, scope, expires),
                    Mac=_decoded(signature),
                )
        except ClientError as error:
            if error_code(error) != "KMSInvalidMacException":
                raise
            raise LinkError(_REFUSED) from error
        # After the signature: only the holder of a genuine link learns that it has merely expired.
        if now.timestamp() >= int(expires):
            raise LinkError("this link has expired; open the newest message of the incident, or resend it")


def _message(incident_id: str, scope: str, expires: str) -> bytes:
    return f"{incident_id}\n{scope}\n{expires}".encode()


def _decoded(signature: str) -> bytes:
    try:
        mac = base64.b64decode(signature + "=" * (-len(signature) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise LinkError(_REFUSED) from error
    # The last character carries bits that decoding ignores: only the spelling that `url` gives is the signature.
    if len(mac) != 32 or base64.urlsafe_b64encode(mac).rstrip(b"=").decode() != signature:
        raise LinkError(_REFUSED)
    return mac
