"""Synthesis needs nothing but this repository, gives the same bytes twice, and says what is wrong in one line."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import app
from infra import workflow
from infra.errors import PreparationError
from infra.paths import APPROVE_DEFINITION, DEFINITION, REPOSITORY
from infra.synthesis import synthesise

from .conftest import Template, repository_context


def run_app(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run app.py from elsewhere, without AWS settings, credentials or a single tool on the path."""
    bare = {"PATH": "/nonexistent", "HOME": str(Path.home()), "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "app.py"), *arguments],
        env={**bare, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


def test_another_process_without_credentials_or_tools_writes_the_same_bytes(template: Template, tmp_path: Path) -> None:
    again = tmp_path / "again"
    # As the CDK command line names the folder.
    finished = run_app(CDK_OUTDIR=str(again))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == str(again)
    # All that the validation adds which `tests/conftest.py` leaves out.
    assert differences(template.assembly, again) == ["validation-report.json"]


def differences(left: Path, right: Path) -> list[str]:
    files = {path.relative_to(left) for path in left.rglob("*") if path.is_file()}
    others = {path.relative_to(right) for path in right.rglob("*") if path.is_file()}
    _, different, unreadable = filecmp.cmpfiles(left, right, [str(name) for name in files & others], shallow=False)
    return sorted([*map(str, files ^ others), *different, *unreadable])


def test_a_context_file_replaces_the_settings(tmp_path: Path) -> None:
    settings = repository_context(stage="local")["truestep"]
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"truestep": settings}))
    assert app.main(["--context", str(path), "--output", str(tmp_path / "out")]) == 0
    template = Template(tmp_path / "out")
    assert template.only("AWS::Events::EventBus")["Name"] == "truestep-local"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["artifacts"]["Recovery"]["properties"]["stackName"] == "truestep-local"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the context file"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"stage": "x", "clusters": []}', "has no 'truestep'"),
        ('{"context": {}}', "has no 'truestep'"),
        ('{"truestep": {"stage": "x"}}', "truestep.clusters: missing"),
    ],
)
def test_a_wrong_context_file_is_one_message_and_no_traceback(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.json"
    if content is not None:
        path.write_text(content)
    assert app.main(["--context", str(path), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out" / "Recovery.template.json").exists()


def test_the_environment_can_name_the_context_file(tmp_path: Path) -> None:
    finished = run_app("--output", str(tmp_path / "out"), TRUESTEP_CONTEXT="/no/such/file.json")
    assert finished.returncode == 1
    assert finished.stderr == "error: cannot read the context file /no/such/file.json: No such file or directory\n"


def test_a_python_without_what_set_up_installs_is_told_which_one_has_it() -> None:
    finished = subprocess.run(
        [sys.executable, "-S", str(REPOSITORY / "app.py")], capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: ")
    assert "make setup" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.parametrize(("name", "path"), [("recovery", DEFINITION), ("approve", APPROVE_DEFINITION)])
def test_every_function_a_workflow_names_is_substituted(name: str, path: Path, template: Template) -> None:
    machine = template.state_machine(name)
    definition = machine["DefinitionString"]
    assert definition == path.read_text()
    for name in machine["DefinitionSubstitutions"]:
        assert f"${{{name}}}" in definition
        definition = definition.replace(f"${{{name}}}", "")
    assert "${" not in definition


def test_a_function_that_the_workflow_names_but_nobody_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = tmp_path / "recovery.asl.json"
    definition.write_text(DEFINITION.read_text().replace("${OpenIncidentArn}", "${OpenTheIncidentArn}"))
    monkeypatch.setattr(workflow, "DEFINITION", definition)
    with pytest.raises(PreparationError, match=r"\$\{OpenTheIncidentArn\}.*known are AwaitReplacementArn"):
        synthesise(repository_context(), tmp_path / "out")


def test_nothing_of_this_machine_is_in_the_assembly(template: Template) -> None:
    documents = [path.read_text() for path in template.assembly.glob("*.json")]
    assert len(documents) >= 3
    assert not [text for text in documents if str(REPOSITORY) in text or os.path.expanduser("~") + "/" in text]  # noqa: PTH111
