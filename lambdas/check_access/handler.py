"""Invoked by people after a deployment: looks at every cluster as the recovery would, and changes nothing."""

from __future__ import annotations

from typing import Any

from lambdas.adapters.access_check import findings_of
from lambdas.adapters.runtime import log, traced
from lambdas.settings import settings_from_environment
from truestep.contract import to_json


def check_access(event: dict[str, Any], context: Any) -> dict[str, Any]:  # noqa: ARG001 - Lambda's signature
    """HyperPod cluster ARN -> findings, ``{check, ok, detail}`` each. What is wrong is a finding, never an error."""
    settings = settings_from_environment("check_access")
    found = {arn: findings_of(cluster) for arn, cluster in settings.clusters.items()}
    missing = sum(not finding.ok for findings in found.values() for finding in findings)
    log("check_access", "access checked", clusters=len(found), missing=missing)
    return {"clusters": {arn: [to_json(finding) for finding in findings] for arn, findings in found.items()}}


handler = traced("check_access", check_access)
