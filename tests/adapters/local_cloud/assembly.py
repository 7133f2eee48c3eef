"""Write a small cloud assembly, so that tests of the local stack need no synthesis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROLE = {"Type": "AWS::IAM::Role", "Properties": {"RoleName": "worker"}}


def function(handler: str, **properties: Any) -> dict[str, Any]:
    """Return a function resource whose code is the assembly's asset."""
    return {
        "Type": "AWS::Lambda::Function",
        "Properties": {
            "Handler": handler,
            "Runtime": "python3.13",
            "Role": {"Fn::GetAtt": ["Role", "Arn"]},
            "Code": {"S3Bucket": {"Fn::Sub": "assets-${AWS::AccountId}-${AWS::Region}"}, "S3Key": "code.zip"},
            **properties,
        },
    }


def write_assembly(
    directory: Path,
    resources: Mapping[str, Any],
    *,
    outputs: Mapping[str, Any] | None = None,
    code: Mapping[str, str] | None = None,
    **sections: Any,
) -> Path:
    """Write the assembly of one stack named `test`, with a role `Role`; returns the directory.

    code: file name -> text of the functions' asset. sections: further template sections.
    """
    asset = directory / "asset.code"
    asset.mkdir(parents=True)
    for name, text in (code or {}).items():
        (asset / name).write_text(text)
    template = {
        "Resources": {"Role": ROLE, **resources},
        "Outputs": {name: {"Value": value} for name, value in (outputs or {}).items()},
        **sections,
    }
    (directory / "Test.template.json").write_text(json.dumps(template))
    files = {"code": {"source": {"path": asset.name}, "destinations": {"here": {"objectKey": "code.zip"}}}}
    (directory / "Test.assets.json").write_text(json.dumps({"files": files}))
    artifact = {
        "type": "aws:cloudformation:stack",
        "properties": {"templateFile": "Test.template.json", "stackName": "test"},
    }
    (directory / "manifest.json").write_text(json.dumps({"artifacts": {"Test": artifact}}))
    return directory
