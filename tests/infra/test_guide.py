"""docs/deploy.md has every value that people supply, and what it says about a mistake is what is said."""

from __future__ import annotations

import json
import logging
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import guide
from infra.configuration import check_destination, parse_settings
from infra.errors import ConfigurationError
from infra.paths import REPOSITORY
from lambdas.domain.cluster_jobs import UnknownJobKindError, job_kind
from lambdas.domain.errors import AlarmRefusedError, SettingsError
from lambdas.domain.intake import check_source
from lambdas.settings import settings_from_environment
from truestep.cli.application import run as truestep
from truestep.cli.drill import shortcoming
from truestep.contract import IdentityRow, NodeName, Rank, RunRef
from truestep.report import reporter_from_environment

from .conftest import CLUSTER_ARN

PODS = ["hyperpod-pytorch-job.yaml", "pytorch-job.yaml"]
PATHS = [prefix + name for prefix, model in guide.MODELS.items() for name in model.model_fields]
NEEDED = [
    prefix + name
    for prefix, model in guide.MODELS.items()
    for name, field in model.model_fields.items()
    if field.is_required()
]


def test_the_table_in_the_guide_is_what_the_settings_say() -> None:
    _, table, _ = guide.parts(guide.DOCUMENT.read_text(encoding="utf-8"))
    assert table == guide.table(), "run python -m infra.guide --write"


@pytest.mark.parametrize("path", PATHS)
def test_a_likely_mistake_in_each_setting_is_refused_by_name(path: str) -> None:
    assert path.replace("[]", "[0]").rpartition(".")[2] in guide.refusal(path)


def test_every_setting_has_a_meaning_and_a_mistake() -> None:
    assert guide.WRONG.keys() == set(PATHS)
    assert [row.value for row in guide.settings_rows() if not row.meaning] == []


@pytest.mark.parametrize("path", NEEDED)
def test_a_needed_setting_that_is_left_out_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"truestep.{path.replace('[]', '[0]')}: missing")):
        parse_settings({"truestep": guide.with_value(path, None)})


def said_of(value: str) -> list[str]:
    """Programs' words in the value's last column."""
    (row,) = [row for row in (*guide.PODS, *guide.COMMANDS) if row.value == value]
    found = re.findall(r"`([^`]+)`", row.refusal)
    return [text for text in found if text != "attach"]


def identity_of(environ: dict[str, str]) -> tuple[IdentityRow, RunRef]:
    attempt = uuid.uuid4().hex
    run = RunRef(run_id="run", attempt_id=attempt, world_size=4, region=environ.get("AWS_REGION", ""))
    return IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("n")), run


@pytest.mark.parametrize("name", [row.value for row in guide.PODS if "warns" in row.refusal])
def test_a_pod_that_lacks_a_value_says_so_when_it_starts(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = {row.value: "value" for row in guide.PODS} | {
        "TRUESTEP_OUTBOX_DIR": str(tmp_path),
        "AWS_REGION": "us-east-2",
    }
    with caplog.at_level(logging.WARNING):
        reporter_from_environment(*identity_of(full), full)
        assert caplog.messages == []
        lacking = {variable: value for variable, value in full.items() if variable != name}
        reporter_from_environment(*identity_of(lacking), lacking)
    (message,) = caplog.messages
    assert message.startswith(name)
    assert said_of(name)[0] in message


def test_a_job_kind_namespace_or_cluster_that_the_recovery_does_not_know_is_refused_as_the_guide_says() -> None:
    (words,) = said_of("TRUESTEP_JOB_KIND")
    with pytest.raises(UnknownJobKindError, match=words):
        job_kind("MPIJob")
    _, words = said_of("POD_NAMESPACE")
    run = RunRef(run_id="r", attempt_id="a", world_size=4, cluster_arn=CLUSTER_ARN, namespace="elsewhere")
    with pytest.raises(AlarmRefusedError, match=words):
        check_source("any", run, ("research",))
    _, words = said_of("TRUESTEP_CLUSTER_ARN")
    settings = settings_from_environment("check_access", {"TRUESTEP_CLUSTERS": "{}"} | {"TRUESTEP_POLICY": "{}"})
    with pytest.raises(SettingsError, match=re.escape(words)):
        settings.cluster(CLUSTER_ARN)


def test_a_sign_in_elsewhere_is_refused_before_anything_is_deployed(cluster: dict[str, Any]) -> None:
    settings = parse_settings({"truestep": {"clusters": [cluster]}})
    here = {"CDK_DEFAULT_ACCOUNT": "111122223333", "CDK_DEFAULT_REGION": "us-west-2"}
    check_destination(settings, {})
    check_destination(settings, here)
    for name, value in (("CDK_DEFAULT_ACCOUNT", "444455556666"), ("CDK_DEFAULT_REGION", "eu-west-1")):
        with pytest.raises(ConfigurationError, match=said_of("AWS sign-in")[0]) as caught:
            check_destination(settings, here | {name: value})
        assert value in str(caught.value)


OUTPUTS = dict.fromkeys(
    ("EventBusName", "TableName", "CheckAccessFunction", "ConsoleFunction", "DecideFunction"), "x"
) | {
    "ClusterArns": CLUSTER_ARN,
    "TrainingSources": "truestep.training.abc123def456.research,truestep.training.abc123def456.vision",
}
DRILL = ["drill", "--cluster-arn", CLUSTER_ARN, "--node", "node"]
MISTAKES: list[tuple[str, int, list[str]]] = [
    ("--outputs", 0, [*DRILL, "--outputs", "nowhere.json"]),
    ("--outputs", 1, [*DRILL, "--outputs", "other.json"]),
    ("--stage", 0, [*DRILL, "--outputs", "outputs.json", "--stage", "staging"]),
    ("--cluster-arn", 0, [*DRILL, "--outputs", "outputs.json", "--cluster-arn", CLUSTER_ARN.replace("abc", "xyz")]),
    ("--node", 0, [*DRILL, "--outputs", "outputs.json", "--node", "My Node"]),
    ("--namespace", 0, [*DRILL, "--outputs", "outputs.json", "--namespace", "default"]),
    ("--namespace", 1, [*DRILL, "--outputs", "outputs.json"]),
]


@pytest.mark.parametrize(("value", "index", "arguments"), MISTAKES)
def test_a_mistake_in_a_command_is_answered_as_the_guide_says(
    value: str,
    index: int,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, setting in (("AWS_REGION", "us-west-2"), ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(name, setting)
    Path("outputs.json").write_text(json.dumps({"truestep-prod": OUTPUTS}))
    Path("other.json").write_text(json.dumps({"truestep-staging": OUTPUTS}))
    assert truestep(arguments) == 2
    assert said_of(value)[index] in " ".join(capsys.readouterr().err.split())


def test_a_command_without_credentials_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert truestep([*DRILL, "--region", "us-west-2"]) == 2
    assert said_of("AWS sign-in")[1] in capsys.readouterr().err


def entry(state: str, outcome: str) -> dict[str, str]:
    return {"state": state, "outcome": outcome, "reason": "because"}


@pytest.mark.parametrize(
    ("status", "timeline", "words"),
    [
        ("closed", [entry("ResolveNode", "resolved")], ""),
        ("closed", [entry("ResolveNode", "node_gone")], said_of("--node")[1]),
        ("escalated", [entry("StopTraining", "escalate"), entry("Escalate", "waiting")], "at StopTraining: because"),
    ],
)
def test_a_drill_that_did_not_go_all_the_way_says_what_to_do(
    status: str, timeline: list[dict[str, str]], words: str
) -> None:
    said = shortcoming({"status": status, "timeline": timeline})
    assert bool(said) is bool(words)
    assert words in said


def test_the_access_patterns_have_every_key_that_the_store_writes() -> None:
    page = (REPOSITORY / "docs" / "access_patterns.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "lambdas" / "adapters").glob("store*.py")]
    keys = set(re.findall(r'"([A-Z]+#?)[{"]', "\n".join(sources))) - {"SK", "PK", "S", "N", "SS"}
    assert {"INCIDENT#", "JOB#", "CLAIM", "ATTEMPTS", "CHECKPOINT#"} <= keys
    assert sorted(key for key in keys if key not in page) == []


def pod_of(name: str) -> dict[str, Any]:
    spec = yaml.safe_load((REPOSITORY / "examples" / "kubernetes" / name).read_text())["spec"]
    replicas = spec.get("replicaSpecs") or list(spec["pytorchReplicaSpecs"].values())
    found: dict[str, Any] = replicas[0]["template"]["spec"]
    return found


@pytest.mark.parametrize("name", PODS)
def test_a_ready_pod_has_its_identity_its_directive_and_its_outbox(name: str) -> None:
    pod = pod_of(name)
    (container,) = pod["containers"]
    assert {entry["name"] for entry in container["env"]} == {row.value for row in guide.PODS}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts["resume"] == "/etc/truestep"
    assert volumes["resume"]["configMap"] == {"name": "truestep-resume-gpt", "optional": True}
    outbox = next(entry["value"] for entry in container["env"] if entry["name"] == "TRUESTEP_OUTBOX_DIR")
    assert outbox.startswith(mounts["fsx"] + "/")
