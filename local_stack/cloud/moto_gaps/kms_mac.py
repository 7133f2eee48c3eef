"""Gap: GenerateMac and VerifyMac take any algorithm; KMS takes only that of the key's spec (HMAC_256: HMAC_SHA_256)."""

from __future__ import annotations

from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.kms.models import KmsBackend


def install() -> None:
    """Refuse an algorithm that the key does not have; VerifyMac goes through GenerateMac."""
    generate = KmsBackend.generate_mac

    def generate_if_compatible(self: Any, message: bytes, key_id: str, mac_algorithm: str, **others: Any) -> Any:
        key = self.keys[self.any_id_to_key_id(key_id)]
        if key.key_spec.startswith("HMAC_") and mac_algorithm != key.key_spec.replace("HMAC_", "HMAC_SHA_"):
            raise JsonRESTError(
                "InvalidKeyUsageException",
                f"Algorithm {mac_algorithm} is incompatible with key spec {key.key_spec}.",
            )
        return generate(self, message=message, key_id=key_id, mac_algorithm=mac_algorithm, **others)

    KmsBackend.generate_mac = generate_if_compatible
