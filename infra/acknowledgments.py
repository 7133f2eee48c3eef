"""Findings of AWS Solutions that are accepted, each on its resource and with the reason."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import IConstruct


def acknowledge(construct: IConstruct, reason: str, *findings: str) -> None:
    """Accept ``findings`` (``SQS3``, ``IAM5[Resource::*]``) of AWS Solutions on the construct and its children."""
    rules = [cdk.Acknowledgment(id=f"AwsSolutions-{finding}", reason=reason) for finding in findings]
    cdk.Validations.of(construct).acknowledge(*rules)
