"""Each check of the lint finds what it is there for, and the exit status says so. `make check` runs it on the stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.lint import (
    Finding,
    check_substitutions,
    check_template,
    check_workflow,
    report,
)
from infra.paths import DEFINITION

from .conftest import Template


def spoilt(template: Template, folder: Path, kind: str, **properties: Any) -> Path:
    document = json.loads(json.dumps(template.document))
    item = next(item for item in document["Resources"].values() if item["Type"] == kind)
    item["Properties"].update(properties)
    path = folder / "spoilt.template.json"
    path.write_text(json.dumps(document))
    return path


def test_a_property_that_cloudformation_does_not_know_is_found(template: Template, tmp_path: Path) -> None:
    assert "BilingMode" in check_template(spoilt(template, tmp_path, "AWS::DynamoDB::Table", BilingMode="X")).problems


def test_a_substitution_that_is_missing_or_left_over_is_found(template: Template, tmp_path: Path) -> None:
    kind = "AWS::StepFunctions::StateMachine"
    path = spoilt(template, tmp_path, kind, DefinitionSubstitutions={"NobodyArn": "x"})
    problems = check_substitutions(path).problems
    assert "substitution NobodyArn is not used" in problems
    assert "left without a substitution" in problems


def test_a_dangling_next_is_found(tmp_path: Path) -> None:
    machine = json.loads(DEFINITION.read_text())
    machine["States"]["OpenIncident"]["Next"] = "Nowhere"
    path = tmp_path / "broken.asl.json"
    path.write_text(json.dumps(machine))
    assert 'No state found named "Nowhere"' in check_workflow(path).problems


def test_a_missing_workflow_is_a_finding(tmp_path: Path) -> None:
    assert "missing" in check_workflow(tmp_path / "recovery.asl.json").problems


def test_the_exit_status_tells_whether_anything_was_found() -> None:
    lines: list[object] = []
    good = Finding(check="one", looked_at="x")
    bad = Finding(check="two", looked_at="y", problems="broken")
    assert report(iter([good]), lines.append) == 0
    assert report(iter([good, bad]), lines.append) == 1
    assert lines == ["ok     one: x", "ok     one: x", "FAILED two: y", "broken"]
