"""Checks what is deployed: the template (AWS Solutions, CloudFormation's schemas), the workflow, the manifests.

    python -m infra.lint

Prints each check with what it looked at; exit status 1 if any failed. Needs no network and no account.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from infra.paths import APPROVE_DEFINITION, DEFINITION, KUBERNETES_MANIFESTS, REPOSITORY
from lambdas.domain.cluster_access import Group

# W3005: CDK makes functions wait for their roles' policies, and names the role itself again beside them.
_IGNORED_BY_CFN_LINT = "W3005"
# statelint 3.1 knows JSONata in a Wait's Seconds only as a mistake; Step Functions has taken it since it has JSONata.
_IGNORED_BY_US = re.compile(r'\.Seconds is "\{% .* %\}" but should be an Integer$')


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's result. ``problems`` is empty where all is well."""

    check: str
    looked_at: str
    problems: str = ""


def check_all(assembly: Path) -> Iterator[Finding]:
    """Run every check, writing the cloud assembly to ``assembly``; later checks need the first."""
    synthesis = check_synthesis(assembly)
    yield synthesis
    template = assembly / "Recovery.template.json"
    if not synthesis.problems:
        yield check_template(template)
        yield check_substitutions(template)
    yield check_workflow(DEFINITION)
    yield check_workflow(APPROVE_DEFINITION)
    yield check_manifests(KUBERNETES_MANIFESTS)


def check_synthesis(assembly: Path) -> Finding:
    """Synthesise in a process of its own, with the AWS Solutions rules on."""
    problems = _output([sys.executable, str(REPOSITORY / "app.py"), "--nag", "--output", str(assembly)])
    return Finding(check="cdk-nag AWS Solutions", looked_at="the stack of cdk.json", problems=problems)


def check_template(template: Path) -> Finding:
    """cfn-lint: resource schemas, references, IAM actions, the embedded state machine."""
    problems = _output([_script("cfn-lint"), "--ignore-checks", _IGNORED_BY_CFN_LINT, "--", str(template)])
    return Finding(check="cfn-lint", looked_at=f"{_count(template)} resources", problems=problems)


def check_substitutions(template: Path) -> Finding:
    """Every ``${Name}`` of a state machine has its substitution, and no substitution is left over."""
    resources = json.loads(template.read_text(encoding="utf-8"))["Resources"].values()
    machines = [item["Properties"] for item in resources if item["Type"] == "AWS::StepFunctions::StateMachine"]
    problems = []
    for machine in machines:
        definition = machine["DefinitionString"]
        for name in machine["DefinitionSubstitutions"]:
            if f"${{{name}}}" not in definition:
                problems.append(f"substitution {name} is not used")
            definition = definition.replace(f"${{{name}}}", "")
        if "${" in definition:
            problems.append("left without a substitution: " + definition.split("${", 1)[1].split("}", 1)[0])
    return Finding(check="substitutions", looked_at=f"{len(machines)} state machines", problems="\n".join(problems))


def check_workflow(definition: Path) -> Finding:
    """statelint: states that cannot be reached, dangling ``Next``, misspelt fields."""
    if not definition.is_file():
        return Finding(check="statelint", looked_at="nothing", problems=f"{definition.name} is missing")
    states = json.loads(definition.read_text(encoding="utf-8"))["States"]
    # URI: the functions' ARNs are substitutions until deployment.
    output = _output([_script("statelint"), "--ignore=URI", str(definition)])
    lines = [line.strip() for line in output.splitlines() if not _IGNORED_BY_US.search(line)]
    problems = "\n".join(line for line in lines if not re.fullmatch(r"\d+ errors?:|One error:", line))
    return Finding(check="statelint", looked_at=f"{len(states)} states of {definition.name}", problems=problems)


def check_manifests(folder: Path) -> Finding:
    """Both kustomizations name every manifest, and each role is bound to the group of its name and to nobody else."""
    problems: list[str] = []
    looked_at = []
    for name, role_kind in (("cluster", "ClusterRole"), ("namespace", "Role")):
        listed = _documents(folder / name / "kustomization.yaml")[0]["resources"]
        present = sorted(path.name for path in (folder / name).iterdir() if path.name != "kustomization.yaml")
        problems += [f"{name}/{one} is not listed" for one in present if one not in listed]
        problems += [f"{name}/{one} is listed but missing" for one in listed if one not in present]
        documents = [document for one in present for document in _documents(folder / name / one)]
        problems += [f"{name}: {problem}" for problem in _role_problems(documents, role_kind)]
        looked_at += [f"{name}/{one}" for one in present]
    return Finding(check="Kubernetes manifests", looked_at=", ".join(looked_at), problems="\n".join(problems))


def _role_problems(documents: list[dict[str, Any]], role_kind: str) -> Iterator[str]:
    roles = {one["metadata"]["name"]: one for one in documents if one["kind"] == role_kind}
    bound = set()
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        if "namespace" in document["metadata"]:
            yield f"{kind} {name} has a namespace; it is given where it is applied"
        if kind == f"{role_kind}Binding":
            bound.add(name)
            subjects = [(subject["kind"], subject["name"]) for subject in document["subjects"]]
            if (document["roleRef"]["kind"], document["roleRef"]["name"]) != (role_kind, name):
                yield f"{kind} {name} refers to another role"
            if name not in roles or subjects != [("Group", name)] or name not in set(Group):
                yield f"{kind} {name} does not bind the role of its name to the group of its name"
        elif kind != role_kind:
            yield f"{kind} {name} does not belong here"
    for name, role in roles.items():
        if name not in bound:
            yield f"{role_kind} {name} is bound to nobody"
        if any("*" in rule[key] for rule in role["rules"] for key in ("apiGroups", "resources", "verbs")):
            yield f"a rule of {role_kind} {name} has a wildcard"


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _count(template: Path) -> int:
    return len(json.loads(template.read_text(encoding="utf-8"))["Resources"])


def _script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts"), name))


def _output(command: list[str]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if finished.returncode == 0:
        return ""
    return (finished.stdout + finished.stderr).strip() or f"exit status {finished.returncode}"


def report(findings: Iterator[Finding], write: Callable[[str], object] = print) -> int:
    """Print the findings as they come; returns the exit status."""
    failed = 0
    for finding in findings:
        failed += bool(finding.problems)
        write(f"{'FAILED' if finding.problems else 'ok':7}{finding.check}: {finding.looked_at}")
        if finding.problems:
            write(finding.problems)
    return 1 if failed else 0


def main() -> int:
    """Command line; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="truestep-lint-") as scratch:
        return report(check_all(Path(scratch, "cdk.out")))


if __name__ == "__main__":
    sys.exit(main())
