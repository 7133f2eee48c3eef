"""How a person's decision, given by a command, is bound to who gives it.

The command signs a ``GetCallerIdentity`` request of STS without sending it; the recovery sends it and so learns the
caller's ARN from AWS, not from the caller. The signature covers the digest of the decision in `IDENTITY_HEADER`, so
that a request which was signed for something else, or for another deployment, decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from truestep.contract.codec import sha256_hex

IDENTITY_HEADER = "x-truestep-decision"
IDENTITY_BODY = "Action=GetCallerIdentity&Version=2011-06-15"
IDENTITY_TYPE = "application/x-www-form-urlencoded"
IDENTITY_SECONDS = 60
"""How long the recovery takes a signed request."""


def decision_digest(incident_id: str, form: Mapping[str, str], *, deployment: str) -> str:
    """SHA-256, in hex, over the deployment, the incident's id and the fields of the decision.

    deployment: as `decider` names it.
    """
    return sha256_hex({"deployment": deployment, "form": dict(form), "incident_id": incident_id})


def decider(function: str, *, region: str = "") -> str:
    """``<region>/<name>`` of the function that decides, by its name or by its ARN, with or without a qualifier.

    Not the account: whoever signs need not know it, and the recovery takes no identity of another one.
    """
    parts = function.split(":")
    return f"{parts[3]}/{parts[6]}" if parts[0] == "arn" else f"{region}/{parts[0]}"
