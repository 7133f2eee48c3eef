"""How a person's decision, given by a command, is bound to who gives it.

The command signs a ``GetCallerIdentity`` request of STS without sending it; the recovery sends it and so learns the
caller's ARN from AWS, not from the caller. The signature covers the digest of the decision in `IDENTITY_HEADER`, so
that a request which was signed for something else decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from truestep.contract.codec import sha256_hex

IDENTITY_HEADER = "x-truestep-decision"
IDENTITY_BODY = "Action=GetCallerIdentity&Version=2011-06-15"
IDENTITY_TYPE = "application/x-www-form-urlencoded"
IDENTITY_SECONDS = 60
"""How long the recovery takes a signed request."""


def decision_digest(incident_id: str, form: Mapping[str, str]) -> str:
    """SHA-256, in hex, over the incident's id and the fields of the decision."""
    return sha256_hex({"form": dict(form), "incident_id": incident_id})
