"""The MAC of a person's decision, by a KMS key that decide_approval alone can sign with."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from botocore.exceptions import ClientError

from lambdas.adapters.aws import client, error_code, transient_errors
from lambdas.adapters.runtime import Answer, Work
from lambdas.domain.decision import digest_of, set_aside
from lambdas.domain.incident import Incident
from lambdas.domain.outcome import Outcome

_ALGORITHM: Final = "HMAC_SHA_256"
_BYTES: Final = 32


class KmsDecisionMacs:
    """`lambdas.ports.DecisionSigner`, and the check of what it made. `kms`: boto3 client; `key_id`: an HMAC_256 key.

    The digest of a decision is signed, not its text: KMS takes messages of 4,096 bytes.
    """

    def __init__(self, kms: Any, key_id: str) -> None:
        self._kms = kms
        self._key_id = key_id

    def sign(self, digest: str) -> str:
        """The MAC of a digest, in base64."""
        with transient_errors():
            answer = self._kms.generate_mac(KeyId=self._key_id, MacAlgorithm=_ALGORITHM, Message=digest.encode())
        return base64.b64encode(answer["Mac"]).decode()

    def verifies(self, digest: str, mac: str) -> bool:
        """Whether `sign` made the MAC for this digest. A key that is disabled or refuses raises: it tells nothing."""
        try:
            given = base64.b64decode(mac, validate=True)
        except (binascii.Error, ValueError):
            return False
        if len(given) != _BYTES:
            return False
        try:
            with transient_errors():
                self._kms.verify_mac(KeyId=self._key_id, MacAlgorithm=_ALGORITHM, Message=digest.encode(), Mac=given)
        except ClientError as error:
            if error_code(error) != "KMSInvalidMacException":
                raise
            return False
        return True


def asked_anew(work: Work, why: str, *, incident: Incident | None = None) -> Answer:
    """Escalate with the decision set aside: only a new one counts. `incident`: as changed, if it was."""
    reopened = set_aside(incident or work.incident, why, now=work.now, policy=work.policy)
    return work.answer(Outcome.ESCALATE, why, incident=reopened)


def genuine(work: Work) -> bool:
    """Whether a decision is on record, and decide_approval made it for this incident, word for word."""
    approval = work.incident.approval
    if approval is None or approval.decision is None:
        return False
    macs = KmsDecisionMacs(client("kms"), work.settings.decision_key_id)
    return macs.verifies(digest_of(work.incident, approval.decision), approval.decision.mac)
