"""docs/deploy.md names every setting, and the example pods are complete."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from infra.configuration import ClusterSettings, DeploymentSettings, NetworkSettings
from infra.paths import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "deploy.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| ")]
PODS = ["hyperpod-pytorch-job.yaml", "pytorch-job.yaml"]


@pytest.mark.parametrize(
    ("model", "before"), [(DeploymentSettings, ""), (ClusterSettings, "clusters[]."), (NetworkSettings, "network.")]
)
def test_the_table_has_every_setting(model: Any, before: str) -> None:
    for name in model.model_fields.keys() - {"clusters", "network"}:
        named = (f"`{before}{name}`", f"`{name}`")
        assert [row for row in ROWS if any(text in row for text in named)], f"{before}{name} is not in docs/deploy.md"


def pod_of(name: str) -> dict[str, Any]:
    spec = yaml.safe_load((REPOSITORY / "examples" / "kubernetes" / name).read_text())["spec"]
    replicas = spec.get("replicaSpecs") or list(spec["pytorchReplicaSpecs"].values())
    found: dict[str, Any] = replicas[0]["template"]["spec"]
    return found


@pytest.mark.parametrize("name", PODS)
def test_a_ready_pod_has_its_identity_its_directive_and_its_outbox(name: str) -> None:
    pod = pod_of(name)
    (container,) = pod["containers"]
    given = {entry["name"] for entry in container["env"]}
    assert given >= {"NODE_NAME", "POD_NAME", "POD_UID", "POD_NAMESPACE", "TRUESTEP_JOB_NAME", "TRUESTEP_JOB_KIND"}
    assert given >= {"TRUESTEP_RUN_ID", "TRUESTEP_CLUSTER_ARN", "AWS_REGION", "TRUESTEP_EVENT_BUS"}
    assert given >= {"TRUESTEP_OUTBOX_DIR", "TRUESTEP_CHECKPOINT_ROOT"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts["resume"] == "/etc/truestep"
    assert volumes["resume"]["configMap"] == {"name": "truestep-resume-gpt", "optional": True}
    outbox = next(entry["value"] for entry in container["env"] if entry["name"] == "TRUESTEP_OUTBOX_DIR")
    assert outbox.startswith(mounts["fsx"] + "/")
