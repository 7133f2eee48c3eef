"""One synthesis a session and set of settings, and a view of its template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.paths import REPOSITORY
from infra.synthesis import STACK_ID, synthesise

CLUSTER_ARN = "arn:aws:sagemaker:us-west-2:111122223333:cluster/abc123def456"
FIRST_CLUSTER = {
    "hyperpod_cluster_arn": CLUSTER_ARN,
    "hyperpod_cluster_name": "training",
    "eks_cluster_name": "training-eks",
    "training_namespaces": ["research"],
    "checkpoint_buckets": ["example-checkpoints/llama"],
}
SECOND_CLUSTER = {
    "hyperpod_cluster_arn": "arn:aws:sagemaker:us-west-2:111122223333:cluster/zzz999zzz999",
    "hyperpod_cluster_name": "second",
    "eks_cluster_name": "second-eks",
    "training_namespaces": ["research"],
}
EXISTING_TOPIC = "arn:aws:sns:us-west-2:111122223333:oncall"
EXISTING_KEY = "arn:aws:kms:us-west-2:111122223333:key/11112222-3333-4444-5555-666677778888"


class Template:
    """A synthesised template and the assets beside it."""

    def __init__(self, assembly: Path) -> None:
        self.assembly = assembly
        self.document = json.loads((assembly / f"{STACK_ID}.template.json").read_text())
        self.resources: dict[str, dict[str, Any]] = self.document["Resources"]

    def of_type(self, kind: str) -> dict[str, dict[str, Any]]:
        """Logical id -> properties."""
        return {name: item["Properties"] for name, item in self.resources.items() if item["Type"] == kind}

    def only(self, kind: str) -> dict[str, Any]:
        """Properties of the one resource of this type."""
        (properties,) = self.of_type(kind).values()
        return properties

    def state_machine(self, name: str) -> dict[str, Any]:
        """Properties of the state machine ``recovery`` or ``approve``."""
        machines = self.of_type("AWS::StepFunctions::StateMachine").values()
        (properties,) = [machine for machine in machines if machine["StateMachineName"].endswith(f"-{name}")]
        return properties

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """Folder -> properties."""
        found = self.of_type("AWS::Lambda::Function").values()
        return {properties["Handler"].split(".")[1]: properties for properties in found}

    def statements(self, role: str) -> list[dict[str, Any]]:
        """Statements of all policies attached to the role with this logical id, lists normalised."""
        policies = self.of_type("AWS::IAM::Policy").values()
        own = [policy for policy in policies if {"Ref": role} in policy["Roles"]]
        found = [statement for policy in own for statement in policy["PolicyDocument"]["Statement"]]
        return [{**one, "Action": as_list(one["Action"]), "Resource": as_list(one["Resource"])} for one in found]

    def function_statements(self, folder: str) -> list[dict[str, Any]]:
        """Statements of the function's role."""
        return self.statements(self.functions[folder]["Role"]["Fn::GetAtt"][0])

    def actions(self, folder: str) -> set[str]:
        """All actions that the function's role allows."""
        return {action for statement in self.function_statements(folder) for action in statement["Action"]}

    def asset_folder(self, key: str) -> Path:
        """Folder of the asset with this ``S3Key``."""
        files = json.loads((self.assembly / f"{STACK_ID}.assets.json").read_text())["files"]
        return self.assembly / str(files[key.removesuffix(".zip")]["source"]["path"])

    @property
    def code_folder(self) -> Path:
        """The functions' one code asset."""
        (key,) = {properties["Code"]["S3Key"] for properties in self.functions.values()}
        return self.asset_folder(key)

    @property
    def layer_folder(self) -> Path:
        """The dependency layer."""
        return self.asset_folder(self.only("AWS::Lambda::LayerVersion")["Content"]["S3Key"])


def as_list(value: Any) -> list[Any]:
    """IAM's one-or-many as many."""
    return value if isinstance(value, list) else [value]


def repository_context(**overrides: Any) -> dict[str, Any]:
    """The context of ``cdk.json`` with some of the settings replaced."""
    context: dict[str, Any] = json.loads((REPOSITORY / "cdk.json").read_text())["context"]
    return {**context, "truestep": {**context["truestep"], **overrides}}


@pytest.fixture(scope="session")
def synthesised(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Template]:
    """Synthesise ``cdk.json`` with overridden settings; the same settings are synthesised once."""
    made: dict[str, Template] = {}

    def make(**overrides: Any) -> Template:
        key = json.dumps(overrides, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("assembly")
            made[key] = Template(synthesise(repository_context(**overrides), folder))
        return made[key]

    return make


@pytest.fixture(scope="session")
def template(synthesised: Callable[..., Template]) -> Template:
    """The template of ``cdk.json`` as it is."""
    return synthesised()


@pytest.fixture(scope="session")
def everything(synthesised: Callable[..., Template]) -> Template:
    """Every optional setting on: two clusters, several namespaces, a network, approvers, other accounts."""
    return synthesised(
        clusters=[{**FIRST_CLUSTER, "training_namespaces": ["research", "team-a"]}, SECOND_CLUSTER],
        network={"subnet_ids": ["subnet-0a000000"], "security_group_ids": ["sg-0b000000"]},
        approver_emails=["oncall@example.com"],
        training_account_ids=["444455556666"],
    )


@pytest.fixture(scope="session")
def adopting(synthesised: Callable[..., Template]) -> Template:
    """A stage that makes little of its own: existing bus and topic, no buckets, nothing protected."""
    return synthesised(
        stage="local",
        deletion_protection=False,
        clusters=[{**FIRST_CLUSTER, "checkpoint_buckets": []}],
        existing_event_bus_name="shared",
        existing_topic_arn=EXISTING_TOPIC,
        existing_topic_key_arn=EXISTING_KEY,
    )


@pytest.fixture
def cluster() -> dict[str, Any]:
    """Settings of one cluster."""
    return dict(FIRST_CLUSTER)
