"""Incident reports in the evidence bucket."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from lambdas.adapters.aws import transient_errors
from lambdas.domain.incident import Incident
from lambdas.domain.report import report, report_key


def write_report(client: Any, bucket: str, incident: Incident) -> str:
    """Put the incident's report; returns its ``s3://`` URI. S3 refuses it if the bytes arrive damaged."""
    body = json.dumps(report(incident), indent=2, ensure_ascii=False).encode()
    key = report_key(incident)
    with transient_errors():
        client.put_object(
            Bucket=bucket,
            Key=key,
            Body=body,
            ContentType="application/json",
            ChecksumSHA256=base64.b64encode(hashlib.sha256(body).digest()).decode(),
        )
    return f"s3://{bucket}/{key}"
