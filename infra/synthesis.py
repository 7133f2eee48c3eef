"""From settings to a cloud assembly on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aws_cdk as cdk

from infra.configuration import CONTEXT_KEY, parse_settings
from infra.errors import InfrastructureError
from infra.recovery_stack import RecoveryStack

# Stack traces of constructs name the temporary folder that jsii unpacked CDK into, another one each time.
_NO_CREATION_STACKS = "aws:cdk:disable-creation-stack-traces"

STACK_ID = "Recovery"
"""Construct id of the stack: the assembly has ``Recovery.template.json`` and ``Recovery.assets.json``."""


def synthesise(context: Mapping[str, Any], output: Path | None = None, *, nag: bool = False) -> Path:
    """Write the cloud assembly of ``context`` to ``output`` and return its folder. The same input gives the same bytes.

    output: None leaves the place to the CDK command line (``CDK_OUTDIR``). nag: check against AWS Solutions too.
    Raises ConfigurationError or PreparationError that says what is wrong, InfrastructureError where a finding is not
    acknowledged (CDK has printed it then).
    """
    # No version metadata and no construct tree: both would differ between machines that deploy the same thing.
    app = cdk.App(
        outdir=str(output) if output else None,
        context={**context, _NO_CREATION_STACKS: True},
        analytics_reporting=False,
        tree_metadata=False,
        stack_traces=False,
    )
    section = app.node.try_get_context(CONTEXT_KEY)
    settings = parse_settings({} if section is None else {CONTEXT_KEY: section})
    RecoveryStack(app, STACK_ID, settings=settings)
    if not nag:
        return Path(app.synth().directory)
    from cdk_nag import AwsSolutionsChecks

    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    try:
        return Path(app.synth().directory)
    except RuntimeError as error:
        if "ValidationFailed" not in str(error):
            raise
        raise InfrastructureError(
            "AWS Solutions has findings, see above: mend them, or acknowledge with a reason"
        ) from error
