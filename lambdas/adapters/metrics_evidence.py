"""One incident's evidence: JSON documents under ``incidents/<id>/`` of the evidence bucket, each with its SHA-256."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from lambdas.adapters.aws import transient_errors
from truestep.contract import canonical_bytes, parse_json

INDEX_NAME = "index.json"


def read_evidence(client: Any, uri: str) -> dict[str, Any]:
    """The JSON object that `EvidenceBucket.put` wrote to this URI. `client` is a boto3 S3 client.

    Raises ValueError or TypeError where it is something else, and what boto3 raises where it is not there.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    with transient_errors():
        body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    document = parse_json(body)
    if not isinstance(document, dict):
        raise TypeError(f"{uri} is not a JSON object")
    return document


class EvidenceBucket:
    """Writes one incident's evidence. `client` is a boto3 S3 client."""

    def __init__(self, client: Any, bucket: str, incident_id: str) -> None:
        self._s3 = client
        self._bucket = bucket
        self._prefix = f"incidents/{incident_id}/"
        self._written: dict[str, dict[str, Any]] = {}

    def put(self, name: str, document: Mapping[str, Any]) -> str:
        """Write ``<name>.json``; returns its URI. S3 verifies the SHA-256, which is also in the object's metadata."""
        return self._put(f"{name}.json", canonical_bytes(document))

    def put_index(self, absent: Mapping[str, str]) -> str:
        """Write the list of what was kept, with sizes and hashes, and of what was not and why; returns its URI."""
        index = {"kept": self._written, "absent": dict(absent)}
        return self._put(INDEX_NAME, canonical_bytes(index))

    def _put(self, file_name: str, body: bytes) -> str:
        digest = hashlib.sha256(body)
        with transient_errors():
            self._s3.put_object(
                Bucket=self._bucket,
                Key=self._prefix + file_name,
                Body=body,
                ContentType="application/json",
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=base64.b64encode(digest.digest()).decode(),
                Metadata={"sha256": digest.hexdigest()},
            )
        uri = f"s3://{self._bucket}/{self._prefix}{file_name}"
        self._written[file_name] = {"uri": uri, "bytes": len(body), "sha256": digest.hexdigest()}
        return uri
